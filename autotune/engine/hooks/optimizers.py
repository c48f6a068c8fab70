"""Hooks on optimizers and backward passes: the ends of steps, their losses, and the optimizer knob."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autotune.engine.gradients import StepRecorder
from autotune.engine.hooks.models import ModelHooks
from autotune.engine.hooks.steps import PhaseTimer, StepWatch

_UNSCALED = "_autotune_unscaled"

_STEP = Optimizer.profile_hook_step(lambda: None).__code__
"""That every step of an optimizer runs in, with its hooks."""


class OptimizerHooks:
    """Follows every optimizer and backward pass of a script.

    Attributes:
        recorder: notes what each step gets and does; None to note nothing.
    """

    def __init__(
        self,
        watch: StepWatch,
        timer: PhaseTimer,
        prepare: Callable[[Optimizer], None],
        models: ModelHooks,
        on_error: Callable[[Exception], None],
        go_on: Callable[[], None],
        *,
        inspects: bool = False,
    ) -> None:
        """Follow optimizers.

        Args:
            watch: told of their steps.
            timer: told when they are at work.
            prepare: sets the optimizer knob before the first step.
            models: that run backward.
            on_error: called when a backward pass raises.
            go_on: called before each step, and each backward pass of a loss that is trained on: what the script did
                aside in the midst of a step is over.
            inspects: keep optimizers alive, to look at them when the script has ended.
        """
        self.recorder: StepRecorder | None = None
        self._scaler: torch.amp.GradScaler | None = None
        self._watch, self._timer, self._prepare = watch, timer, prepare
        self._models, self._on_error, self._go_on = models, on_error, go_on
        self._known: list[weakref.ref[Optimizer]] = []
        self._inspected: list[Optimizer] | None = [] if inspects else None
        self._at_work: list[weakref.ref[Optimizer]] = []

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those that have stepped and are still there, in the order of their first step."""
        return [optimizer for optimizer in (known() for known in self._known) if optimizer is not None]

    @property
    def scales_loss(self) -> bool:
        """A loss scaler is at work."""
        return self._scaler is not None

    def read_scale(self) -> float | None:
        """Return the loss scale now; waits for the device. None without a scaler."""
        return None if self._scaler is None else self._scaler.get_scale()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Hook every optimizer of the process, and what runs gradients backward."""
        handles = (register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after))
        with ExitStack() as stack:
            for handle in handles:
                stack.callback(handle.remove)
            for owner, name, hooked in (
                (Optimizer, "__init__", self._count_built),
                (torch.autograd, "backward", self._watch_backward),
                (torch.autograd, "grad", self._watch_grad),
                (torch.amp.GradScaler, "scale", self._watch_scale),
            ):
                plain = getattr(owner, name)
                setattr(owner, name, hooked(plain))
                stack.callback(setattr, owner, name, plain)
            yield

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._leave_failed(optimizer)
        if not any(optimizer is one for one in self.optimizers):
            self._know(optimizer)
            self._prepare(optimizer)
        self._at_work.append(weakref.ref(optimizer))
        if self.recorder is not None:
            self.recorder.before(optimizer, has_closure=len(args) > 1 or bool(kwargs.get("closure")))
        self._go_on()
        self._timer.enter("optimizer")
        self._watch.optimizer_began()

    def _know(self, optimizer: Optimizer) -> None:
        if self._inspected is not None:
            self._inspected.clear()  # what the script has let go of while it trains on is gone, as without a look at it
        self._known = [known for known in self._known if known() is not None]
        self._known.append(weakref.ref(optimizer))
        weakref.finalize(optimizer, self._watch.optimizer_gone, id(optimizer)).atexit = False
        if self._inspected is not None:
            self._inspected += self.optimizers

    def _leave_failed(self, optimizer: Optimizer) -> None:
        """Leave the steps that have raised, as of one that ran out of memory: PyTorch tells of no end then."""
        own = [place for place, one in enumerate(self._at_work) if one() is optimizer]
        failed = [place for place, one in enumerate(self._at_work) if one() is None]
        if own:
            failed += own[_count_steps_at_work(optimizer) - 1 :]
        for _ in self._at_work[min(failed, default=len(self._at_work)) :]:
            self._at_work.pop()
            self._timer.leave()
            self._watch.optimizer_failed()

    def _after(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._at_work:
            self._at_work.pop()
        self._timer.leave()
        if self.recorder is not None:
            self.recorder.after(optimizer)
        self._watch.optimizer_ended(id(optimizer))

    def _count_built(self, plain: Callable[..., None]) -> Callable[..., None]:
        def build(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            plain(optimizer, *args, **kwargs)
            self._watch.optimizer_built()

        return build

    def _watch_backward(self, plain: Callable[..., None]) -> Callable[..., None]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if not self._watch.is_evaluating:
                self._go_on()
            self._timer.enter("backward")
            try:
                with self._models.unseen():  # recomputed activations are no new calls
                    plain(tensors, *args, **kwargs)
            except Exception as error:
                self._on_error(error)
                raise
            finally:
                self._timer.leave()
            if self.recorder is not None and self._watch.is_by_hand:
                for root in self._models.roots:
                    self.recorder.note_backward(root)
            self._watch.went_backward(_scalar(tensors))

        return backward

    def _watch_grad(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if torch._guards.TracingContext.try_get() is not None:
                return plain(outputs, *args, **kwargs)  # a compiler at work on a model that computes its loss itself
            self._timer.enter("backward")
            try:
                with self._models.unseen():
                    gradients = plain(outputs, *args, **kwargs)
            finally:
                self._timer.leave()
            # A gradient that is itself differentiated is a part of some loss, not a step.
            if self._is_attack():
                self._watch.took_gradients()
            elif not kwargs.get("create_graph"):
                self._watch.went_backward(_scalar(outputs))
            return gradients

        return grad

    def _is_attack(self) -> bool:
        """Return whether gradients were taken of what was called in eval mode for them."""
        return self._watch.is_evaluating and not self._watch.is_by_hand

    def _watch_scale(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
            scaled = plain(scaler, outputs)
            if scaled is not outputs:
                self._scaler = scaler
                if isinstance(scaled, Tensor) and isinstance(outputs, Tensor):
                    setattr(scaled, _UNSCALED, outputs.detach())
            return scaled

        return scale


def _count_steps_at_work(optimizer: Optimizer) -> int:
    """Return how many steps of an optimizer are at work, one inside the other: a subclass calls its parent's."""
    frame, found = sys._getframe(), 0
    while frame.f_back is not None:
        frame = frame.f_back
        found += frame.f_code is _STEP and frame.f_locals.get("self") is optimizer
    return found


def _scalar(tensors: Any) -> Tensor | None:
    """Return the loss that is run backward, as it was before a scaler scaled it; None when it is not one scalar."""
    loss = tensors[0] if isinstance(tensors, list | tuple) and len(tensors) == 1 else tensors
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return None
    unscaled: Tensor = getattr(loss, _UNSCALED, loss)
    kept = unscaled.detach()
    # A model that computes its loss may be a CUDA graph: its next run overwrites what this one has returned.
    return kept.clone() if kept.is_cuda else kept
