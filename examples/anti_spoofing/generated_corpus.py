"""The simulated corpus in the user's cache folder, written at first use."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from autotune.errors import TargetError
from speech_synthesis import DEV_CLIPS, TRAIN_CLIPS, write_corpus

_VERSION = 1  # a change of the synthesis makes a corpus of its own
_UNFINISHED = ".anti-spoofing-"
_STALE_SECONDS = 24 * 3600.0


def find_generated_corpus() -> Path:
    """Return the folder of the generated corpus; it is written at first use.

    Raises:
        TargetError: the cache folder cannot be written.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autotune-examples"
    corpus = cache / f"anti-spoofing-{TRAIN_CLIPS}-{DEV_CLIPS}-v{_VERSION}"
    try:
        if not corpus.is_dir():
            _generate(corpus)
    except OSError as reason:
        hint = "set XDG_CACHE_HOME to a folder that can be written, or use clips of your own: see the README"
        raise TargetError(f"cannot write {corpus}: {reason.strerror}", hint=hint) from None
    return corpus


def _generate(corpus: Path) -> None:
    """Write the corpus. Of several processes each writes a folder of its own; the first to finish gives it its name."""
    corpus.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale_folders(corpus.parent)
    unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=corpus.parent))
    try:
        write_corpus(unfinished, train_clips=TRAIN_CLIPS, dev_clips=DEV_CLIPS)
        unfinished.rename(corpus)
    except OSError:
        if not corpus.is_dir():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _remove_stale_folders(cache: Path) -> None:
    """Remove what a killed process left behind; younger folders may be in the making."""
    for folder in cache.glob(f"{_UNFINISHED}*"):
        try:
            if time.time() - folder.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
        except FileNotFoundError:  # another process was faster
            pass
