"""Hooks on the models of a script: found at their first training call, where the model knobs are applied.

The root is the outermost module that is called in training mode with gradients on and has something to train: not
the one that owns most parameters (tied weights hide it) and not a loss module. A call before there is an optimizer
is a rehearsal, for the shapes or a summary, of the model or of its parts one by one. Where a step ends without any,
those that are called in eval mode with gradients on are trained: some scripts never leave it after a validation. One
whose `forward` is called past the call of the module (`engine.hooks.forward`) is found by what it calls, and hooked
from the next step on.
A frozen network that a step goes through beside its root (a loss network, a teacher) is accompanied: it is called in
the root's arithmetic and layout, and is one itself as soon as it has something to train.
`Module._compiled_call_impl` is where `Module.compile` hangs its own work: outside of everything compiled, and left out
of copies and pickles.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from autotune.engine.dataloader import count_samples, move_batch, read_generators, restore_generators
from autotune.engine.hooks.forward import ForwardCalls
from autotune.engine.hooks.steps import PhaseTimer, StepWatch
from autotune.engine.operations import Operations, refuses_to_be_watched, watched_operations

Call = Callable[..., Any]
Prepare = Callable[[nn.Module], Callable[[Call, tuple[Any, ...], dict[str, Any]], Any]]
"""Applies the model knobs to a root at its first training call and returns how to run such a call."""


_MOST_VAIN = 2
"""Times that later models are looked for and none is found, until they are not looked for any more."""


class ModelHooks:
    """Follows the outermost model calls of a script.

    Attributes:
        roots: models found in the first steps, in the order of their first training call.
        compiles_itself: the script compiles a model.
        trains_evaluated: models in eval mode are trained.
        began_late: a step was taken before any was found.
        seen: operations of the first training call of every root together, if they were asked for.
        calls: the arguments of that call, `(args, kwargs)` by the root's position, its tensors without their data.
    """

    def __init__(
        self,
        watch: StepWatch,
        timer: PhaseTimer,
        prepare: Prepare,
        turn: Callable[[bool], None],
        *,
        on_error: Callable[[Exception], None],
        outside: Callable[[Callable[[], Any], bool], Any] = lambda call, _evaluates: call(),
        accompany: Prepare | None = None,
        inspects: bool = False,
    ) -> None:
        self.roots: list[nn.Module] = []
        self._accompany = accompany
        self._accompanied: list[ref[nn.Module]] = []
        self.compiles_itself = False
        self.seen = Operations()
        self.calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._on_error, self._inspects, self._outside = on_error, inspects, outside
        self._watch, self._timer, self._prepare, self._turn = watch, timer, prepare, turn
        self._depth = 0
        self._finding = self._is_late = False
        self.trains_evaluated = self.began_late = False
        self._saw_trained = self._saw_evaluated = self._saw_rehearsed = False
        self._vain = 0
        self._process = os.getpid()
        self._runs = WeakKeyDictionary[nn.Module, Any]()
        self._forward_calls = ForwardCalls(self._is_followed)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Look for roots; those found stay hooked until the end."""
        self._finding = True
        self._look()
        try:
            with self._watch_compile(), self._forward_calls.installed(), _unseen_by_torchscript():
                yield
        finally:
            self.stop_finding()
            for module in (*self._runs, *filter(None, (one() for one in self._accompanied))):
                module.__dict__.pop("_compiled_call_impl", None)

    def find_more(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Look for models again where what begins to be trained is none's that was found: of another fold, or stage.

        Only one that is built as one that was found becomes a root: of others nothing is known.

        Returns:
            Whether they are looked for from now on.
        """
        if not self.roots or self._vain >= _MOST_VAIN:
            return False
        known = {id(one) for root in self._runs for one in root.parameters()}
        if all(id(one) in known for one in parameters):
            return False
        self._finding = self._is_late = True
        self._vain += 1
        if not self._depth:
            self._look()
        return True

    def end_step(self) -> bool:
        """Follow what a step has called by its `forward`; look for the models of one that has ended without any.

        Returns:
            Whether it has: they were called in a rehearsal, in eval mode or past their call.
        """
        self._forward_calls.end_step()
        was_trained, was_evaluated, was_rehearsed = self._saw_trained, self._saw_evaluated, self._saw_rehearsed
        self._saw_trained = self._saw_evaluated = self._saw_rehearsed = False
        if was_trained or self.trains_evaluated:
            return False
        self.trains_evaluated = was_evaluated and (bool(self.roots) or not was_rehearsed)
        is_unknown = self.trains_evaluated or (was_rehearsed and not self.roots)
        self.began_late = self.began_late or (is_unknown and not self.roots)
        return is_unknown

    @contextmanager
    def _watch_compile(self) -> Iterator[None]:
        plain, hooks = nn.Module.compile, self

        def compile_in_place(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            plain(module, *args, **kwargs)
            compiled = module.__dict__.get("_compiled_call_impl")
            if hooks._finding and compiled is not None:
                module.__dict__["_compiled_call_impl"] = _CompiledCall(compiled, hooks, module)

        nn.Module.compile = compile_in_place  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.compile = plain  # type: ignore[method-assign]

    def is_called_outside(self) -> bool:
        """Return whether a call now is of an outermost module, while roots are looked for in this process."""
        return self._finding and not self._depth and os.getpid() == self._process

    def _is_followed(self, module: nn.Module) -> bool:
        """Return whether a call of a module that begins now is hooked, or looked at."""
        is_hooked = isinstance(module.__dict__.get("_compiled_call_impl"), _RootCall)
        return self.is_called_outside() or (is_hooked and not self._depth)

    def stop_finding(self) -> None:
        """Look for no further root: calls of other modules cost nothing from here on."""
        self._finding = False
        look_for_no_models()

    def _look(self) -> None:
        hooks = self

        def discover(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return hooks.discover(module, args, kwargs)

        nn.Module._compiled_call_impl = discover

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Take module calls inside for parts of something larger: a root's own, or those of a backward pass."""
        self._depth += 1
        if self._finding:  # a class that is written to forgets where it found its methods, and all that are made of it
            look_for_no_models()  # a compiler that traces inner calls must not see that roots are looked for
        try:
            yield
        finally:
            self._depth -= 1
            if self._finding and not self._depth:
                self._look()

    def discover(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an outermost module that is no root; it becomes one by a training call."""
        if _hands_call_on(module):
            return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        is_part = self._forward_calls.find_caller(module)
        if not is_part and _has_no_weights(module):
            return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        has_something_to_train = is_part or any(p.requires_grad for p in module.parameters())
        if has_something_to_train and self._is_training_call(module):
            if self._watch.has_begun and not is_part and self._may_be_root(module):
                self._adopt(module)
                return module._compiled_call_impl(*args, **kwargs)  # type: ignore[misc]
            self._saw_rehearsed = True
        if not has_something_to_train and self._is_accompanied(module):
            self._hang_on_frozen(module)
            return module._compiled_call_impl(*args, **kwargs)  # type: ignore[misc]
        with self.unseen():
            if has_something_to_train and not module.training:
                self._saw_evaluated |= torch.is_grad_enabled()
                self._leave_training(module)
            elif has_something_to_train and not torch.is_grad_enabled():
                self._look_at_batch()
            evaluates = has_something_to_train and not module.training
            return self._outside(partial(_find_call(module), *args, **kwargs), evaluates)

    def _is_accompanied(self, module: nn.Module) -> bool:
        # Frozen in another type it answers in that, and what follows expects it.
        is_network = {parameter.dtype for parameter in module.parameters()} == {torch.float32}
        return self._accompany is not None and bool(self.roots) and is_network and self._timer.is_between

    def _hang_on_frozen(self, module: nn.Module) -> None:
        assert self._accompany is not None
        run, inner, held = self._accompany(module), _hold_call(module), ref(module)
        before = {name: own for name, own in module.__dict__.items() if name == "_compiled_call_impl"}

        def put_back(module: nn.Module) -> None:
            del module.__dict__["_compiled_call_impl"]
            module.__dict__.update(before)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth or torch.compiler.is_compiling():
                return inner(*args, **kwargs)
            module = held()
            assert module is not None
            if self._finding and any(p.requires_grad for p in module.parameters()):
                put_back(module)  # frozen for a call alone: a critic, while its maker trains
                return module(*args, **kwargs)
            is_between = self._timer.is_between
            own = partial(run, inner, args, kwargs) if is_between else partial(inner, *args, **kwargs)
            with self.unseen():
                return self._outside(own, False)

        module.__dict__["_compiled_call_impl"] = _RootCall(call, of_compiled=is_compiled(module))
        self._accompanied.append(held)

    def _may_be_root(self, module: nn.Module) -> bool:
        return not self._is_late or any(_is_alike(module, root) for root in self.roots)

    def _is_training_call(self, module: nn.Module) -> bool:
        return (module.training or self.trains_evaluated) and torch.is_grad_enabled()

    def _adopt(self, root: nn.Module) -> None:
        compiled = is_compiled(root)
        self.compiles_itself = self.compiles_itself or compiled
        to_inspect = [True] if self._inspects and not compiled and not self._is_late else []
        own = _hold_call(root)  # what is asked of it in eval mode need not be compiled, in as many shapes as there are
        if root not in self._runs:  # else the script has compiled it in place since: it is prepared
            self._runs[root] = self._prepare(root)
            self._vain = 0
            if not self._is_late:
                self.roots.append(root)
        run, inner, held = self._runs[root], _hold_call(root), ref(root)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth or torch.compiler.is_compiling():
                return inner(*args, **kwargs)
            root = held()
            assert root is not None
            with self.unseen():
                if self._is_training_call(root):
                    if to_inspect:
                        to_inspect.clear()
                        return self._inspect(root, run, inner, args, kwargs)
                    return self._train(root, run, inner, args, kwargs)
                if not root.training:  # a generator that makes samples for its critic still trains
                    self._saw_evaluated |= torch.is_grad_enabled()
                    self._leave_training(root)
                else:
                    self._look_at_batch()
                return self._outside(partial(inner if root.training else own, *args, **kwargs), not root.training)

        # Written past __setattr__: a module that torch.compile returned hands attributes on to the one it wraps.
        root.__dict__["_compiled_call_impl"] = _RootCall(call, of_compiled=compiled)

    def _inspect(self, root: nn.Module, run: Any, inner: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._turn(True)  # whatever begins with the first training call is no part of the model
        position = next(position for position, one in enumerate(self.roots) if one is root)
        try:
            self.calls[position] = move_batch((args, kwargs), lambda tensor: tensor.detach().to("meta"))
        except Exception:  # a container or a tensor of its own kind: the call itself must not suffer from it
            pass
        device = next((one.device for one in root.parameters() if not one.is_meta), None)
        seen = Operations()

        def watched(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            before = read_generators()
            try:
                with watched_operations(device) as seen:
                    return inner(*args, **kwargs)
            except Exception as error:
                if not refuses_to_be_watched(error):
                    raise
            seen = Operations()
            restore_generators(before)
            return inner(*args, **kwargs)

        returned = self._train(root, run, watched, args, kwargs)
        self.seen.draws_random |= seen.draws_random
        self.seen.flops += seen.flops
        self.seen.calls += seen.calls
        self.seen.attention |= seen.attention
        return returned

    def _train(self, root: nn.Module, run: Any, inner: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._turn(True)
        self._saw_trained = True
        self._watch.model_called(id(root), _count(args, kwargs), training=True)
        self._timer.enter("forward")
        try:
            return run(inner, args, kwargs)
        except Exception as error:
            self._on_error(error)
            raise
        finally:
            self._timer.leave()

    def _leave_training(self, module: nn.Module) -> None:
        is_tracked = torch.is_grad_enabled()
        if is_tracked and self._watch.look_at_batch():
            return  # an attack on the batch to be trained on
        self._turn(False)
        self._watch.model_called(id(module), 0, training=False, is_tracked=is_tracked)

    def _look_at_batch(self) -> None:
        if self._watch.model_looked():
            self._turn(False)


@contextmanager
def _unseen_by_torchscript() -> Iterator[None]:
    """Keep `torch.jit.script` from compiling the hook of a model as one of its attributes."""
    ignored: list[str] = torch.jit._recursive.ignored_attributes
    ignored.append("_compiled_call_impl")
    try:
        yield
    finally:
        ignored.remove("_compiled_call_impl")


class _Hook:
    """What hangs on a module, and no copy and no pickle of it takes along."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class _CompiledCall(_Hook):
    """The hook on a module that the script has compiled in place, where roots are looked for."""

    def __init__(self, plain: Call, hooks: ModelHooks, module: nn.Module) -> None:
        self.plain = plain
        self._hooks, self._module = hooks, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not self._hooks.is_called_outside():
            return self.plain(*args, **kwargs)
        return self._hooks.discover(self._module, args, kwargs)


class _RootCall(_Hook):
    """The hook on a root."""

    def __init__(self, call: Call, *, of_compiled: bool) -> None:
        self._call, self.of_compiled = call, of_compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


def look_for_no_models() -> None:
    """Let calls of modules cost nothing: in a loader's worker, whose modules make samples, or where all are found."""
    nn.Module._compiled_call_impl = None


def is_compiled(root: nn.Module) -> bool:
    """Return whether the script has torch.compile at work in a module, by a call or in place."""

    def is_at_work(module: nn.Module) -> bool:
        hook = module.__dict__.get("_compiled_call_impl")
        compiled = hook.of_compiled if isinstance(hook, _RootCall) else hook is not None
        return compiled or type(module).__name__ == "OptimizedModule"

    return any(map(is_at_work, root.modules()))


def _call_held(held: ref[nn.Module], *args: Any, **kwargs: Any) -> Any:
    module = held()
    assert module is not None
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def _is_alike(module: nn.Module, root: nn.Module) -> bool:
    """Return whether two models are built of the same parts, whatever their sizes."""
    return [type(one) for one in module.modules()] == [type(one) for one in root.modules()]


def _hands_call_on(module: nn.Module) -> bool:
    """Return whether a module is none of the model: `nn.DataParallel` of one device, or of the CPU."""
    return (
        isinstance(module, nn.DataParallel)
        and type(module).forward is nn.DataParallel.forward
        and "_compiled_call_impl" not in module.__dict__
        and len(module.device_ids) < 2
    )


def _has_no_weights(module: nn.Module) -> bool:
    """Return whether a module is none of the model, and may call the one that it is given: `criterion(model, batch)`.

    Not where the script has compiled it: a compiler must not see that roots are looked for.
    """
    return next(module.parameters(), None) is None and not is_compiled(module)


def _find_call(module: nn.Module) -> Call:
    """Return what runs a module: compiled in place, or as it is."""
    compiled: Call | None = module.__dict__.get("_compiled_call_impl")
    if isinstance(compiled, _CompiledCall):
        return compiled.plain
    return module._call_impl if compiled is None else compiled


def _hold_call(module: nn.Module) -> Call:
    """Return what runs a module, which is gone as soon as the script lets go of it."""
    inner = _find_call(module)
    return partial(_call_held, ref(module)) if inner == module._call_impl else inner


def _count(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    try:
        return count_samples([*args, *kwargs.values()])
    except ValueError:
        return 1
