"""The weights of a finished training as safetensors, which other tools read; nothing where that is not installed."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from autotune.records.codec import sync_folder
from autotune.records.layout import WEIGHTS_FILE
from autotune.train.loop.checkpoint import read_verified

_AVERAGED = "module."
"""Before the names of the weights that a `torch.optim.swa_utils.AveragedModel` keeps."""


class _Saved(nn.Module):
    """Stands for a model with the weights of a checkpoint, which is all that is asked of it."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._weights = weights

    def state_dict(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the weights."""
        return dict(self._weights)


def write_weights(checkpoint: Path, folder: Path, warn: Callable[[str], None], *, prefix: str = "") -> Path | None:
    """Write the weights that were evaluated into a run's folder, and return the file; what prevents it is warned of.

    Of tensors that share their memory one is written, as `safetensors.torch.load_model` expects it.

    Args:
        checkpoint: that holds them.
        folder: of the run.
        warn: told why there is no file, where safetensors is installed.
        prefix: left out before the weights' names: of what was wrapped around the user's own module.
    """
    if importlib.util.find_spec("safetensors") is None:
        return None
    from safetensors.torch import save_model

    final = folder / WEIGHTS_FILE
    gc.collect()  # the training that is over: a model and what its hooks refer to hold each other
    try:
        chosen = _choose_weights(read_verified(checkpoint))
        weights = {name.removeprefix(prefix): one for name, one in chosen.items()}
        scratch = Path(tempfile.mkdtemp(prefix=".tmp-", dir=folder))
        try:
            save_model(_Saved(weights), str(scratch / WEIGHTS_FILE), metadata={"format": "pt"})
            _sync(scratch / WEIGHTS_FILE)
            (scratch / WEIGHTS_FILE).replace(final)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        sync_folder(folder)
    except Exception as error:  # a full disk, or a state that is not all tensors: the training is over and whole
        text = " ".join(str(error).split())[:200]
        warn(f"{final} was not written: {type(error).__name__}: {text}; the weights are in {checkpoint}")
        return None
    return final


def _choose_weights(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a checkpoint's weights by the model's own names: their average where there is one, which is evaluated."""
    averaged = state["averaged"]
    if averaged is None:
        return dict(state["model"])
    return {name.removeprefix(_AVERAGED): one for name, one in averaged.items() if name.startswith(_AVERAGED)}


def _sync(file: Path) -> None:
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())
