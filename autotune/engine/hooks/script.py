"""All hooks of one script together: what a config changes is applied, the rest is left as the script has it."""

from __future__ import annotations

import numbers
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from autotune.engine.activation_checkpointing import exchange_activation_checkpointing
from autotune.engine.compilation import apply_compilation, distinct_compile_cache
from autotune.engine.dataloader import move_batch
from autotune.engine.determinism import make_reference
from autotune.engine.hooks.compiled import EagerFallback
from autotune.engine.hooks.loaders import LoaderHooks, apply_loader_knobs
from autotune.engine.hooks.models import Call, ModelHooks
from autotune.engine.hooks.optimizers import OptimizerHooks
from autotune.engine.hooks.sharing import SharingHooks
from autotune.engine.hooks.steps import PhaseTimer, ScriptStep, StepWatch
from autotune.engine.kernels import attention_backend, cudnn_benchmark, list_attention_kernels
from autotune.engine.memory_format import apply_memory_format, arrange_input
from autotune.engine.optimizer import apply_optimizer_implementation, fit_state, is_fresh
from autotune.engine.precision import autocast, matmul_precision
from autotune.engine.threads import intra_op_threads
from autotune.records.config import TrainConfig

_FINDING_STEPS = 3
"""Steps after which every model has been called; no more are looked for."""


@dataclass(frozen=True)
class ScriptSettings:
    """What is to be changed about a script.

    Attributes:
        config: the settings wanted.
        changed: knobs in which they differ from what the script does; all others are left alone.
        training_loaders: keys of the loaders it trains from; empty while they are not known.
        in_float64: compute its models in float64.
        on_compile_failure: called when a compilation fails, and the model runs eagerly; None to have it raised.
    """

    config: TrainConfig
    changed: frozenset[str] = frozenset()
    training_loaders: tuple[str, ...] = ()
    in_float64: bool = False
    on_compile_failure: Callable[[BaseException], None] | None = None


class ScriptHooks:
    """The hooks on one script's process.

    Attributes:
        watch: where its steps end.
        timer: where its time goes.
        loaders: its loaders.
        models: its models.
        optimizers: its optimizers.
        sharing: how it shares its models over processes.
        autocast_dtypes: what it casts to by itself; a script with a flag for that may name float32.
        steps: taken so far.
    """

    def __init__(
        self,
        settings: ScriptSettings,
        *,
        on_step: Callable[[ScriptStep], None],
        turn: Callable[[bool], None],
        now: Callable[[], float],
        go_on: Callable[[], None] = lambda: None,
        on_error: Callable[[Exception], None] = lambda _error: None,
        inspects: bool = False,
    ) -> None:
        """Prepare the hooks.

        Args:
            settings: what is to be changed.
            on_step: called after each step.
            turn: called with True whenever the script trains, with False when it turns to something else.
            now: reads the clock, in seconds.
            go_on: called where it trains on within a step, whatever it did in between.
            on_error: called when a training call or a backward pass raises, before the script can catch it.
            inspects: count the operations of each model's first training call.
        """
        self.steps, self._finds_until = 0, _FINDING_STEPS
        self.autocast_dtypes: set[torch.dtype] = set()
        self._settings, self._on_step = settings, on_step
        self._stack = ExitStack()
        self._device: torch.device | None = None
        self._our_autocast = False
        self._own_kernels: list[SDPBackend] = []
        self._fallback: EagerFallback | None = None
        self.watch = StepWatch(self._end_step, settings.training_loaders)
        self.timer = PhaseTimer(now)
        self.loaders = LoaderHooks(self.watch, self.timer, self._prepare_loader, turn, inspects=inspects)
        self.models = ModelHooks(
            self.watch,
            self.timer,
            self._prepare_model,
            turn,
            on_error=on_error,
            outside=self._run_outside,
            accompany=self._prepare_frozen if settings.changed & {"precision", "memory_format"} else None,
            inspects=inspects,
        )
        self.optimizers = OptimizerHooks(
            self.watch, self.timer, self._prepare_optimizer, self.models, on_error, go_on, inspects=inspects
        )
        self.sharing = SharingHooks(settings.config, settings.changed)

    @property
    def device(self) -> torch.device:
        """Where the script's first model is, or what it trains without one; the CPU before it is known."""
        return self._device or torch.device("cpu")

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Hook the process."""
        with self._stack as stack:
            for hooks in (self.loaders, self.models, self.optimizers, self.sharing):
                stack.enter_context(hooks.installed())
            stack.enter_context(self._watch_autocast())
            if "non_blocking" in self._settings.changed:
                stack.enter_context(asynchronous_copies())
            yield

    def _end_step(self, step: ScriptStep) -> None:
        if self.models.end_step():  # of this step nothing is known yet
            return
        if self._device is None:
            self._begin_without_model(step)
        self.steps += 1
        if self.steps == self._finds_until:
            self.models.stop_finding()
        self._on_step(step)

    def _prepare_loader(self, loader: DataLoader[Any]) -> None:
        apply_loader_knobs(loader, self._settings.config, self._settings.changed)

    def _prepare_optimizer(self, optimizer: Optimizer) -> None:
        parameters = (one for group in optimizer.param_groups for one in group["params"])
        if self.steps >= self._finds_until and self.models.find_more(parameters):
            self._finds_until = self.steps + _FINDING_STEPS
        # A state made by one implementation need not fit another: only a fresh optimizer is switched.
        if "optimizer_implementation" in self._settings.changed and is_fresh(optimizer):
            apply_optimizer_implementation(optimizer, self._settings.config)

    def _begin_without_model(self, step: ScriptStep) -> None:
        stepped = (one for optimizer in self.optimizers.optimizers for one in optimizer.param_groups[0]["params"])
        trained = next(chain(stepped, step.losses), None)
        if trained is not None:
            self._device = trained.device
            self._enter_process_settings()

    def _prepare_model(self, root: nn.Module) -> Callable[[Call, tuple[Any, ...], dict[str, Any]], Any]:
        if self._device is None:
            self._enter_process_settings()
        if not self.models.roots:
            self._device = next(root.parameters()).device
        self._change_model(root)
        return self._make_run()

    def _prepare_frozen(self, module: nn.Module) -> Callable[[Call, tuple[Any, ...], dict[str, Any]], Any]:
        if "memory_format" in self._settings.changed:
            apply_memory_format(module, self._settings.config)
        return self._make_run()

    def _make_run(self) -> Callable[[Call, tuple[Any, ...], dict[str, Any]], Any]:
        """Return how a call is run: its inputs in the layout wanted, in the arithmetic wanted."""
        config, changed, device = self._settings.config, self._settings.changed, self.device

        def arrange(tensor: torch.Tensor) -> torch.Tensor:
            return arrange_input(tensor, config)

        def run(inner: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if "memory_format" in changed:
                args, kwargs = move_batch((args, kwargs), arrange)
            if "precision" not in changed:
                return inner(*args, **kwargs)
            self._our_autocast = True
            try:
                with autocast(config, device):
                    returned = inner(*args, **kwargs)
            finally:
                self._our_autocast = False
            # What follows the call, the loss first of all, was written for full precision.
            return move_batch(returned, _widen)

        return run

    def _change_model(self, root: nn.Module) -> None:
        config, changed = self._settings.config, self._settings.changed
        self.sharing.prepare(root)
        if "memory_format" in changed:
            apply_memory_format(root, config)
        if "activation_checkpointing" in changed:
            exchange_activation_checkpointing(root, config)
        if "compile_mode" in changed:
            self._compile(root)
        if self._settings.in_float64:
            make_reference(root)
        if "memory_format" in changed or self._settings.in_float64:
            fit_state(self.optimizers.optimizers, root, widens=self._settings.in_float64)

    def _compile(self, root: nn.Module) -> None:
        apply_compilation(root, self._settings.config)
        on_failure = self._settings.on_compile_failure
        if on_failure is None or self._settings.config.compile_mode == "off":
            return
        if self._fallback is None:
            self._fallback = EagerFallback(on_failure)
            self._stack.enter_context(self._fallback.installed())
        self._fallback.follow(root)

    def _enter_process_settings(self) -> None:
        # At the first training call, or after the first step without one: what the script itself sets has been set.
        if "attention_backend" in self._settings.changed:
            self._own_kernels = list_attention_kernels()
        self._stack.enter_context(process_settings(self._settings.config, self._settings.changed))
        if "memory_format" in self._settings.changed:
            self._stack.enter_context(plainly_saved())

    def _run_outside(self, call: Callable[[], Any], evaluates: bool) -> Any:
        """Return what a call that trains nothing does, with the script's own attention kernels.

        Ours were chosen for training calls, which may be in other types. What an evaluation is given is laid out as the
        script has it: launches of a search run none of its code.
        """
        with sdpa_kernel(self._own_kernels) if self._own_kernels else nullcontext():
            returned = call()
        return _lay_out_plainly(returned) if evaluates and "memory_format" in self._settings.changed else returned

    @contextmanager
    def _watch_autocast(self) -> Iterator[None]:
        plain = torch.autocast.__enter__

        def enter(context: torch.autocast) -> Any:
            entered = plain(context)  # type: ignore[no-untyped-call]
            if not self._our_autocast and torch.is_autocast_enabled(context.device):
                self.autocast_dtypes |= {torch.get_autocast_dtype(context.device)} - {torch.float32}
            return entered

        torch.autocast.__enter__ = enter  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.autocast.__enter__ = plain  # type: ignore[method-assign]


@contextmanager
def process_settings(config: TrainConfig, changed: Collection[str]) -> Iterator[None]:
    """Apply those of the changed knobs that are global state of torch, and restore what was there.

    Args:
        config: the settings.
        changed: knobs to apply.
    """
    contexts: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "num_threads": lambda: intra_op_threads(config),
        "matmul_precision": lambda: matmul_precision(config),
        "cudnn_benchmark": lambda: cudnn_benchmark(config),
        "attention_backend": lambda: attention_backend(config),
    }
    with ExitStack() as stack:
        for name, context in contexts.items():
            if name in changed:
                stack.enter_context(context())
        stack.enter_context(distinct_compile_cache(config))
        yield


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _lay_out_plainly(returned: Any) -> Any:
    """Return what a model has returned with 4-d tensors contiguous, which may be viewed in another shape."""
    return move_batch(returned, lambda tensor: tensor.contiguous() if tensor.ndim == 4 else tensor)


@contextmanager
def plainly_saved() -> Iterator[None]:
    """Let safetensors save weights in any layout, by whatever name: it refuses those that are not contiguous."""
    try:
        import safetensors.torch as saver
    except ImportError:
        yield
        return

    def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
        def save(tensors: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
            return plain({name: tensor.contiguous() for name, tensor in tensors.items()}, *args, **kwargs)

        return save

    wrapped = {plain: wrap(plain) for plain in (saver.save, saver.save_file)}
    bound = [
        (names, name, plain)
        for names in [getattr(module, "__dict__", {}) for module in [*sys.modules.values()]]
        for name, value in [*names.items()]
        for plain in wrapped
        if value is plain
    ]
    for names, name, plain in bound:
        names[name] = wrapped[plain]
    try:
        yield
    finally:
        for names, name, plain in bound:
            names[name] = plain


@contextmanager
def asynchronous_copies() -> Iterator[None]:
    """Let a script's own copies from pinned memory to a GPU return before they are done."""
    plain_to, plain_cuda = torch.Tensor.to, torch.Tensor.cuda

    def to(tensor: torch.Tensor, /, *args: Any, **kwargs: Any) -> Any:
        # Nothing is asked of a tensor that stays on the host: in a forked loader worker there is no driver to ask.
        may_wait = tensor.device.type == "cpu" and _leaves_host(args, kwargs) and not _says_non_blocking(args, kwargs)
        if may_wait and tensor.is_pinned():
            kwargs["non_blocking"] = True
        return plain_to(tensor, *args, **kwargs)

    def cuda(tensor: torch.Tensor, /, *args: Any, **kwargs: Any) -> Any:
        if "non_blocking" not in kwargs and len(args) < 2 and tensor.is_pinned():
            kwargs["non_blocking"] = True
        return plain_cuda(tensor, *args, **kwargs)

    torch.Tensor.to, torch.Tensor.cuda = to, cuda  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.to, torch.Tensor.cuda = plain_to, plain_cuda  # type: ignore[method-assign]


def _leaves_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of `Tensor.to` is to another device than the CPU."""
    given = kwargs.get("device", kwargs.get("tensor", args[0] if args else None))
    if isinstance(given, torch.Tensor):
        given = given.device
    return isinstance(given, torch.device | str | int) and torch.device(given).type != "cpu"


def _says_non_blocking(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of `Tensor.to` chooses itself: by name, or in its place after the device and dtype."""
    place = 1 if args and isinstance(args[0], torch.dtype | torch.Tensor) else 2
    return "non_blocking" in kwargs or len(args) > place


@contextmanager
def shifted_seeds(offset: int, on_seed: Callable[[], None]) -> Iterator[None]:
    """Add a number to every seed that a script sets, and hear when it sets one.

    Args:
        offset: added to integer seeds; 0 leaves them as they are.
        on_seed: called at each.
    """
    owners = (
        (torch, "manual_seed", 2**64),
        (torch.random, "manual_seed", 2**64),
        (torch.cuda, "manual_seed", 2**64),
        (torch.cuda, "manual_seed_all", 2**64),
        (random, "seed", 2**64),
        (np.random, "seed", 2**32),
    )
    depth = 0

    def shift(plain: Callable[..., Any], modulus: int) -> Callable[..., Any]:
        def seed(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            on_seed()
            added = 0 if depth else offset  # torch's own seeds the GPUs by the same public function
            depth += 1
            try:
                shifted = {name: _add(value, added, modulus) for name, value in kwargs.items()}
                return plain(*(_add(value, added, modulus) for value in args), **shifted)
            finally:
                depth -= 1

        return seed

    plains = [getattr(owner, name) for owner, name, _ in owners]
    for (owner, name, modulus), plain in zip(owners, plains, strict=True):
        setattr(owner, name, shift(plain, modulus))
    try:
        yield
    finally:
        for (owner, name, _), plain in zip(owners, plains, strict=True):
            setattr(owner, name, plain)


def _add(value: Any, offset: int, modulus: int) -> Any:
    if offset == 0 or not isinstance(value, numbers.Integral) or isinstance(value, bool):
        return value
    shifted = int(value) + offset
    return shifted % modulus if shifted >= modulus else shifted
