"""Knobs `optimizer_implementation` and `learning_rate_scale`: how the optimizer walks its parameters, and how far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autotune.records.config import OptimizerImplementation, TrainConfig
from autotune.records.facts import OptimizerFacts

_MOMENTUM = "momentum_buffer"


def apply_optimizer_implementation(optimizer: Optimizer, config: TrainConfig) -> None:
    """Switch a fresh optimizer of torch's own to the config's implementation; None leaves it as built."""
    wanted = config.optimizer_implementation
    if wanted is None or getattr(optimizer, "grad_scale", None) is not None:
        return  # a loss scaler has left unscaling to it, as it does to one that was built fused
    if hasattr(optimizer, "_step_supports_amp_scaling"):
        optimizer._step_supports_amp_scaling = wanted == "fused"
    if wanted == "fused" and isinstance(optimizer, torch.optim.SGD):
        _LateMomentum(optimizer)
    for group in optimizer.param_groups:
        if "fused" in group:
            group["fused"] = wanted == "fused"
        if "foreach" in group:
            group["foreach"] = wanted == "foreach"


def is_fresh(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has taken no step; Adagrad fills its state when it is built."""
    return all(
        isinstance(one, Mapping) and "step" in one and float(one["step"]) == 0.0 for one in optimizer.state.values()
    )


class _LateMomentum:
    """Begins the momentum of parameters that get their first gradient late at zero, which is how it begins anyway.

    Fused SGD takes momentum of all parameters of a group, or of none. Once all have theirs there is nothing to do.

    Args:
        optimizer: before its first step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._hook = optimizer.register_step_pre_hook(self._begin)

    def _begin(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        are_missing = False
        for group in optimizer.param_groups:
            if not group["momentum"]:
                continue
            without = [one for one in group["params"] if optimizer.state.get(one, {}).get(_MOMENTUM) is None]
            are_missing = are_missing or bool(without)
            late = [one for one in without if one.grad is not None]
            stepped = sum(one.grad is not None for one in group["params"]) if late else 0
            for parameter in late if len(late) < stepped else ():
                optimizer.state[parameter][_MOMENTUM] = torch.zeros_like(parameter)
        if not are_missing:
            self._hook.remove()


def apply_learning_rate_scale(optimizer: Optimizer, config: TrainConfig) -> None:
    """Scale every learning rate of a fresh optimizer, before a scheduler takes them for its own."""
    if config.learning_rate_scale == 1.0:
        return
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * config.learning_rate_scale


def current_implementation(optimizer: Optimizer, device: torch.device) -> OptimizerImplementation | None:
    """Return what a fresh optimizer will do; None when it has no such switch.

    PyTorch's default is foreach on CUDA and the for-loop elsewhere (`torch.optim.optimizer`,
    `_default_to_fused_or_foreach`).
    """
    group = optimizer.param_groups[0]
    if group.get("fused"):
        return "fused"
    if "foreach" not in group:
        return None
    if group["foreach"] is None:
        return "foreach" if device.type == "cuda" else "for-loop"
    return "foreach" if group["foreach"] else "for-loop"


def read_optimizer_facts(optimizer: Optimizer, device: torch.device) -> OptimizerFacts:
    """Return which implementations the optimizer can be switched to, found by running each on one parameter."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim"):
        reason = f"{kind.__name__} is not one of torch.optim's own optimizers"
        return OptimizerFacts(name=kind.__name__, implementations=(), reason=reason)
    candidates: tuple[OptimizerImplementation, ...] = ("for-loop", "foreach", "fused")
    # What begins at its first gradient, undamped, cannot begin at zero.
    is_damped = any(group.get("momentum") and group.get("dampening") for group in optimizer.param_groups)
    works = tuple(name for name in candidates if _runs(kind, name, device) and not (name == "fused" and is_damped))
    reason = "" if works else f"{kind.__name__} has no foreach or fused switch"
    return OptimizerFacts(name=kind.__name__, implementations=works, reason=reason)


def _runs(kind: type[Optimizer], implementation: str, device: torch.device) -> bool:
    parameter = torch.nn.Parameter(torch.ones(4, device=device))
    parameter.grad = torch.ones_like(parameter)
    switch = {"fused": True} if implementation == "fused" else {"foreach": implementation == "foreach"}
    build: Any = kind
    try:
        build([parameter], lr=1e-3, **switch).step()
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


def fit_state(optimizers: Iterable[Optimizer], model: nn.Module, *, widens: bool) -> None:
    """Bring what optimizers hold of a model to the layout that its parameters have been given after their first step.

    A fused optimizer pairs the elements of a weight and its state as they lie in memory, whatever their strides.

    Args:
        optimizers: in whose state it is replaced.
        model: its gradients are laid out anew too.
        widens: floating-point state is to have its parameter's type as well.
    """
    states = [optimizer.state for optimizer in optimizers]
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data = _lay_out(parameter.grad.data, parameter, widens=False)
        for state in (one[parameter] for one in states if parameter in one):
            for name, value in state.items():
                if isinstance(value, Tensor) and value.ndim and value.shape == parameter.shape:
                    state[name] = _lay_out(value, parameter, widens=widens)


def _lay_out(value: Tensor, parameter: nn.Parameter, *, widens: bool) -> Tensor:
    dtype = parameter.dtype if widens and value.is_floating_point() else value.dtype
    if value.stride() == parameter.stride() and value.dtype == dtype:
        return value
    return torch.empty_like(parameter.detach(), dtype=dtype).copy_(value)
