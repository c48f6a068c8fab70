"""The gradient of one micro batch under a training's own numerics and under its baseline's, at the same weights.

    micro batch, copied ── own: autocast, compiled ────▶ gradient ┐ elements noted, the same of both
                        └─ baseline's: eager, its own ──▶ gradient ┘ everything is put back after each

Only what can be switched in place is: precision, float32 products, the attention kernel, cuDNN's choice, compilation.
Dropout lets everything pass in both arms, for other arithmetic draws other masks, and then nothing is compiled: that
draws others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from autotune.drift.record.object_state import Restore
from autotune.drift.record.side_computation import side_computation
from autotune.engine.determinism import without_dropout
from autotune.engine.device import read_generator
from autotune.engine.gradients import choose, dense_gradient, name_parameters, pick, share_elements
from autotune.engine.kernels import attention_backend, cudnn_benchmark
from autotune.engine.loop import Training
from autotune.engine.precision import autocast, matmul_precision
from autotune.records.config import TrainConfig
from autotune.targets.workload import LoadedWorkload

SWITCHED = ("precision", "matmul_precision", "attention_backend", "cudnn_benchmark", "compile_mode")
"""Knobs whose effect on a gradient is compared; the reference is eager whatever the baseline's compile_mode."""

_EVERY_KERNEL = [
    SDPBackend.MATH,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
]
_DRAWS_MATTER, _DRAWS_DIFFER = 0.01, 0.25
_USUAL_SCALE = 2.0**12
"""Of a loss in fp16, which no scaler adapts here."""
_MOST_UNREPEATED = 1e-3  # squared, relative: atomic additions in bf16 make 1e-5


class IncomparableGradients(Exception):
    """The two gradients differ for a reason that is not the numerics; the text says which."""


class GradientPair(NamedTuple):
    """The same elements of one micro batch's gradient, twice, float32 or float64 `[elements]` on the CPU."""

    own: Tensor
    """Under the training's numerics, unscaled."""
    baseline: Tensor
    """Under the baseline's."""


class PairedGradients:
    """Computes both gradients of a micro batch beside a training.

    Attributes:
        layers: name, noted elements and elements of each parameter, in the order of a row.
        switched: knobs that differ and are compared; fewer once the model has been seen to draw random numbers.
    """

    def __init__(self, training: Training, loaded: LoadedWorkload, config: TrainConfig, baseline: TrainConfig) -> None:
        """Choose which elements are noted.

        Args:
            training: built with the config, inside its `backend_settings`.
            loaded: its workload.
            config: its settings.
            baseline: the settings to compare with.
        """
        self._training, self._loaded = training, loaded
        self._config, self._baseline = config, baseline
        self.switched = tuple(name for name in SWITCHED if getattr(config, name) != getattr(baseline, name))
        groups = training.optimizer.param_groups
        self._parameters = [leaf for group in groups for leaf in group["params"] if leaf.requires_grad]
        self._device = self._parameters[0].device
        self._draws_random = self._draws_beyond_dropout = False
        self._restore: Restore
        widths = share_elements([leaf.numel() for leaf in self._parameters])
        self._chosen = [
            choose(leaf.numel(), width, seed=position, device=leaf.device)
            for position, (leaf, width) in enumerate(zip(self._parameters, widths, strict=True))
        ]
        names = name_parameters(training.model)
        self.layers = [
            (names.get(id(leaf)) or f"parameter {position}", width * parts, leaf.numel() * parts)
            for position, (leaf, width) in enumerate(zip(self._parameters, widths, strict=True))
            for parts in [2 if leaf.is_complex() else 1]
        ]

    def compute(self, batch: Any, *, repeats: bool = False) -> GradientPair:
        """Return both gradients of a micro batch as the loader collated it; the training stays as it is.

        Args:
            batch: as collated.
            repeats: compute the baseline's twice, to see that it is the same; a third more work.

        Raises:
            IncomparableGradients: random numbers cannot be held the same, nothing that differs can be switched, the
                same computation has another result the second time, or the model changes its own weights as it
                computes the loss.
            Exception: whatever the user's code or PyTorch raises, running out of memory above all.
        """
        versions = [leaf._version for leaf in self._parameters]
        with side_computation(
            self._training.model, self._parameters, self._loaded.workload, self._device
        ) as self._restore:
            pair = self._compute(batch, repeats=repeats)
        if versions != [leaf._version for leaf in self._parameters]:
            raise IncomparableGradients("the model changes its weights while it computes its loss")
        return pair

    def _compute(self, batch: Any, *, repeats: bool) -> GradientPair:
        theirs = self._run_baseline(batch)
        if not self._draws_random and theirs.has_drawn:
            self._draws_random = True
            self.switched = tuple(name for name in self.switched if name != "compile_mode")
            theirs = self._run_baseline(batch)
            self._draws_beyond_dropout = theirs.has_drawn
        if not self.switched:
            raise IncomparableGradients("compiled, the model draws other random numbers")
        if repeats:
            self._require_repeatable(batch, theirs.gradient)
        ours = self._run_own(batch)
        if self._draws_beyond_dropout:
            self._require_same_draws(batch, ours.gradient, theirs.gradient)
        return GradientPair(ours.gradient, theirs.gradient)

    def _require_repeatable(self, batch: Any, theirs: Tensor) -> None:
        """Refuse what is not a function of the weights and the batch, as far as these can be put back."""
        again = self._run_baseline(batch).gradient
        if float((again - theirs).square().sum()) > _MOST_UNREPEATED * float(theirs.square().sum()):
            raise IncomparableGradients(
                "the baseline's gradient of the same batch is another one each time: the loss depends on something "
                "that cannot be put back, such as a random generator in a global"
            )

    def _require_same_draws(self, batch: Any, ours: Tensor, theirs: Tensor) -> None:
        """Refuse gradients that differ about as much as two of the baseline's that draw other random numbers."""
        torch.manual_seed(torch.initial_seed() ^ 1)
        other = self._run_baseline(batch).gradient
        by_draws, by_numerics = (float((arm - theirs).square().sum()) for arm in (other, ours))
        matters = by_draws > _DRAWS_MATTER * float(theirs.square().sum())
        if matters and by_numerics > _DRAWS_DIFFER * by_draws:
            raise IncomparableGradients("the model draws random numbers that cannot be held the same")

    def _run_baseline(self, batch: Any) -> _Arm:
        with self._baseline_kernels():
            # In fp16 its gradients would vanish; alone it has a scaler of its own.
            scale = 1.0 if self._baseline.precision != "fp16" else _USUAL_SCALE
            return self._run(batch, self._baseline, scale=scale)

    def _run_own(self, batch: Any) -> _Arm:
        scaler = self._training.scaler
        with eagerly() if self._draws_random else nullcontext():
            return self._run(batch, self._config, scale=1.0 if scaler is None else scaler.get_scale())

    @contextmanager
    def _baseline_kernels(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(eagerly())
            stack.enter_context(matmul_precision(self._baseline))
            stack.enter_context(cudnn_benchmark(self._baseline))
            if self._baseline.attention_backend != "auto":
                stack.enter_context(attention_backend(self._baseline))
            elif self._config.attention_backend != "auto":
                stack.enter_context(sdpa_kernel(_EVERY_KERNEL))  # "auto" alone would leave the other one in force
            yield

    def _run(self, batch: Any, config: TrainConfig, *, scale: float) -> _Arm:
        before = read_generator(self._device)
        with without_dropout() if self._draws_random else nullcontext():
            placed = self._training.place(copy.deepcopy(batch))  # the user's code may change it in place
            with autocast(config, self._device):
                returned = self._loaded.workload.compute_loss(self._training.model, placed)
            loss = returned[0] if isinstance(returned, tuple) else returned
            self._backward(loss * scale if scale != 1.0 else loss)
        has_drawn = not torch.equal(before, read_generator(self._device))
        gradient = pick([dense_gradient(leaf) for leaf in self._parameters], self._chosen) / scale
        for leaf in (*self._training.model.parameters(), *self._parameters):
            leaf.grad = None
        self._restore()
        return _Arm(gradient, has_drawn)

    def _backward(self, loss: Tensor) -> None:
        if not any(_steps_in_backward(leaf) for leaf in self._parameters):
            loss.backward()  # type: ignore[no-untyped-call]
            return
        found = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        for leaf, gradient in zip(self._parameters, found, strict=True):
            leaf.grad = gradient


class _Arm(NamedTuple):
    gradient: Tensor
    has_drawn: bool


@contextmanager
def eagerly() -> Iterator[None]:
    """Call everything that is compiled as it was before; what has been compiled is kept for later calls."""
    stance: Callable[[str], Any] = torch.compiler.set_stance
    with stance("force_eager"):
        yield


def _steps_in_backward(leaf: Tensor) -> bool:
    """Return whether the user has something done with a gradient as soon as it is there, such as a step."""
    return bool(getattr(leaf, "_post_accumulate_grad_hooks", None))
