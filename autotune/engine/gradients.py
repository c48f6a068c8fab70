"""What an optimizer gets and does at weights that are held: gradients, changes of weights, learning rates.

    window ── forward, backward, clip ──▶ gradient, noted ── optimizer steps ──▶ change, noted ── weights put back
    window ── forward, backward ──▶ gradient, noted ── weights changed by hand ── weights put back at the next call

Both arms of a comparison note the same elements of every parameter, so that nothing but those has to be kept. They do
so in the model's order: an optimizer that was given a set of parameters has another one in each process, and Pyro has
an optimizer for each of a set.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autotune.engine.dataloader import mix_seed
from autotune.engine.optimizer import is_fresh
from autotune.engine.shards import whole

MOST_ELEMENTS = 2**17
"""Noted of a model; norms of more than these hundred thousand are the same to a tenth of a per cent."""

_LEAST_OF_LAYER = 256

_UNNAMED = sys.maxsize
"""The place of a parameter that no model has."""


@dataclass(frozen=True)
class RecordedStep:
    """One optimizer step at held weights.

    Attributes:
        gradient: float32 or float64 `[elements]`, as the optimizer got it: unscaled and clipped.
        update: what it changed, `[elements]`.
        learning_rates: of its parameter groups.
        layout: of the recorder when it was noted; rows of another one are in another order.
    """

    gradient: Tensor
    update: Tensor
    learning_rates: tuple[float, ...]
    layout: int = 0


@dataclass
class _Arm:
    """One optimizer of the training, or one model of a training that has none."""

    parameters: list[Tensor]
    chosen: list[Tensor | None]
    names: list[str | None]
    places: list[int]
    sizes: list[tuple[int, int]]
    held: list[Tensor] = field(default_factory=list)
    before: list[Tensor] = field(default_factory=list)
    state: dict[Tensor, dict[str, Any]] = field(default_factory=dict)
    gradient: Tensor | None = None
    is_fresh: bool = True
    has_closure: bool = False
    is_by_hand: bool = False
    is_early: bool = False


class StepRecorder:
    """Notes the steps of one training's optimizers; hang `before` and `after` around each of their steps.

    A training without optimizers changes its weights by itself: call `note_backward` after each backward pass, and
    `put_back` before each call of a model.

    Attributes:
        holds: put the weights back after each step, and a fresh optimizer's state too.
        keeps_state: leave the optimizer's state as the step has made it.
        layout: how often the order of a step's row has changed, as models were found after a first step.
    """

    def __init__(self, names: Callable[[], Mapping[int, str]] = dict) -> None:
        """Prepare to record.

        Args:
            names: returns what parameters are called, by id and in the models' order; some may have no name.
        """
        self.holds = True
        self.keeps_state = False
        self.layout = 0
        self._names = names
        self._arms: dict[int, _Arm] = {}
        self._noted: dict[int, RecordedStep] = {}

    def before(self, optimizer: Optimizer, *, has_closure: bool = False) -> None:
        """Note the gradients that a step begins with.

        Args:
            optimizer: about to step.
            has_closure: it computes its gradients itself; they are noted when it has.
        """
        if self._by_hand:  # it has optimizers after all
            self._arms.clear()
            self._noted.clear()
        arm = self._arms.get(id(optimizer))
        if arm is None or (arm.is_early and self._names()):
            self.layout += arm is not None
            arm = self._adopt(id(optimizer), _list_parameters(optimizer))
        if self.holds:
            arm.is_fresh = is_fresh(optimizer)
            arm.state = _copy_state(optimizer) if arm.is_fresh and not self.keeps_state else {}
            # Not only those that are noted: some join later, by another group or because they were frozen.
            arm.held = _list_parameters(optimizer)
            arm.before = _copy_all(arm.held)
            arm.has_closure = has_closure
            arm.gradient = None if has_closure or _overflowed(optimizer) else _read_gradient(optimizer, arm)

    def after(self, optimizer: Optimizer) -> None:
        """Note what the step changed, and put it back while the weights are held."""
        arm = self._arms[id(optimizer)]
        if not self.holds:
            return
        if arm.has_closure:
            arm.gradient = _read_gradient(optimizer, arm)
        before = {id(parameter): old for parameter, old in zip(arm.held, arm.before, strict=True)}
        changes = [new.detach() - before.get(id(new), new.detach()) for new in arm.parameters]
        _write_all(arm.held, arm.before)
        if arm.is_fresh and not self.keeps_state:
            optimizer.state.clear()  # a state that went on would carry the error of one window into all later ones
            optimizer.state.update(arm.state)
        if arm.gradient is None:
            return
        rates = tuple(float(group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None)
        self._noted[id(optimizer)] = RecordedStep(arm.gradient, pick(changes, arm.chosen), rates)
        arm.held, arm.before, arm.gradient = [], [], None

    def note_backward(self, model: nn.Module) -> None:
        """Note the gradients that a model has after a backward pass; nothing where they were not left with it."""
        arm = self._arms.get(id(model))
        if arm is None:
            arm = self._adopt(id(model), [parameter for parameter in model.parameters() if parameter.requires_grad])
            arm.is_by_hand, arm.before = True, _copy_all(arm.parameters)
        if self.holds and any(parameter.grad is not None for parameter in arm.parameters):
            gradient = pick([dense_gradient(parameter) for parameter in arm.parameters], arm.chosen)
            self._noted[id(model)] = RecordedStep(gradient, torch.zeros(0), ())

    def hold(self) -> None:
        """Hold the weights as they are now."""
        self.holds = True
        for arm in self._by_hand:
            arm.before = _copy_all(arm.parameters)

    def put_back(self) -> None:
        """Put back what a training without optimizers has changed, while the weights are held."""
        for arm in self._by_hand if self.holds else ():
            _write_all(arm.parameters, arm.before)

    def take(self) -> RecordedStep | None:
        """Return the steps noted since the last call as one; None for none, or not one of each optimizer."""
        if not self._noted or self._noted.keys() != self._arms.keys():
            self._noted.clear()
            return None
        steps = [self._noted[key] for key in self._order]
        self._noted.clear()
        return RecordedStep(
            torch.cat([step.gradient for step in steps]),
            torch.cat([step.update for step in steps]),
            tuple(rate for step in steps for rate in step.learning_rates),
            self.layout,
        )

    @property
    def parameters(self) -> list[Tensor]:
        """Every parameter that the optimizers seen so far train."""
        return [parameter for key in self._order for parameter in self._arms[key].parameters]

    @property
    def layers(self) -> list[tuple[str, int, int]]:
        """Name, noted elements and elements of each parameter, in the order of a step's row."""
        arms = [self._arms[key] for key in self._order]
        listed = [(arm, position) for arm in arms for position in range(len(arm.parameters))]
        return [
            (arm.names[at] or f"parameter {position} of shape {list(arm.parameters[at].shape)}", *arm.sizes[at])
            for position, (arm, at) in enumerate(listed)
        ]

    @property
    def _order(self) -> list[int]:
        """The arms in the order of what they train; those of which no model names anything come last, as they came."""
        return sorted(self._arms, key=lambda key: self._arms[key].places)

    @property
    def _by_hand(self) -> list[_Arm]:
        return [arm for arm in self._arms.values() if arm.is_by_hand]

    def _adopt(self, key: int, parameters: list[Tensor]) -> _Arm:
        names = self._names()
        order = {key: place for place, key in enumerate(names)}
        placed = sorted(((order.get(id(one), len(order)), one) for one in parameters), key=lambda one: one[0])
        parameters = [one for _, one in placed]
        widths = share_elements([parameter.numel() for parameter in parameters])
        noted = [(one, width, 2 if one.is_complex() else 1) for one, width in zip(parameters, widths, strict=True)]
        arm = self._arms[key] = _Arm(
            parameters,
            [choose(one.numel(), width, seed=at, device=one.device) for at, (one, width, _) in enumerate(noted)],
            [names.get(id(one)) for one in parameters],
            [place if place < len(order) else _UNNAMED for place, _ in placed],
            [(parts * width, parts * one.numel()) for one, width, parts in noted],
            is_early=not names,
        )
        return arm


def name_parameters(*models: nn.Module) -> dict[int, str]:
    """Return the names of the parameters of models, by id; with the number of its model where there are several."""
    return {
        id(parameter): name if len(models) == 1 else f"{number}.{name}"
        for number, model in enumerate(models)
        for name, parameter in model.named_parameters()
    }


def share_elements(sizes: Sequence[int]) -> list[int]:
    """Return how many elements of each parameter are noted: all of a small model, a share of each layer of a large."""
    total = sum(sizes)
    if total <= MOST_ELEMENTS:
        return list(sizes)
    return [min(size, max(_LEAST_OF_LAYER, MOST_ELEMENTS * size // total)) for size in sizes]


def choose(size: int, width: int, *, seed: int, device: torch.device) -> Tensor | None:
    """Return which elements of a parameter are noted, one at random from each of equal parts; None for all."""
    if width == size:
        return None
    generator = torch.Generator().manual_seed(mix_seed(seed, size))
    starts = torch.arange(width) * size // width
    parts = torch.diff(starts, append=torch.tensor([size]))
    chosen = starts + (torch.rand(width, generator=generator, dtype=torch.float64) * parts).long()
    return chosen.to(device)


def _read_gradient(optimizer: Optimizer, arm: _Arm) -> Tensor:
    gradients = [dense_gradient(parameter) for parameter in arm.parameters]
    return pick(gradients, arm.chosen) / _own_scale(optimizer)


def _copy_state(optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    """Return the state that an optimizer was built with, most with none."""
    return {parameter: copy.deepcopy(values) for parameter, values in optimizer.state.items()}


def _copy_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _write_all(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


def _list_parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _own_scale(optimizer: Optimizer) -> float:
    """Return the loss scale that a fused optimizer takes off by itself; 1 where the gradients came without."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)


def _overflowed(optimizer: Optimizer) -> bool:
    """Return whether a fused optimizer is going to leave out a step because a gradient has overflowed."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def dense_gradient(parameter: Tensor) -> Tensor:
    """Return a parameter's gradient, zeros where it has none."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter)
    return gradient.to_dense() if gradient.is_sparse else gradient


def pick(tensors: Sequence[Tensor], chosen: Sequence[Tensor | None]) -> Tensor:
    """Return the noted elements of all parameters, float32 or float64 `[elements]`, on the host.

    Of sharded tensors every process has to ask.
    """
    parts = []
    for tensor, elements in zip(tensors, chosen, strict=True):
        flat = whole(tensor.detach()).reshape(-1)  # the logical order, whatever the layout in memory
        part = flat if elements is None else flat[elements]
        part = torch.view_as_real(part).reshape(-1) if part.is_complex() else part
        parts.append(part.to(torch.float64 if part.dtype == torch.float64 else torch.float32).cpu())
    return torch.cat(parts) if parts else torch.zeros(0)
