"""Where a script's steps begin and end, learned from the events of its training. Pure bookkeeping.

A step ends when every optimizer that takes part has stepped (two of them: the cycle of both). Without any optimizer
it ends with each backward pass. Its samples are those that the training's loaders yielded; without a loader, those
that the model was called with.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_MOST_ACCUMULATED = 1024
"""After so many backward passes without a step, an optimizer that was built is taken for one that is never used."""

_FORGET_AFTER = 64
"""An optimizer that sits out so many steps of the others takes no part any more."""


@dataclass(frozen=True)
class ScriptStep:
    """One optimizer step of a script.

    Attributes:
        samples: trained on.
        losses: what backward was called on, scalars on the device, in order.
        micro_batches: that the loader gave; without a loader, training calls of the first model.
        closures: backward passes within an optimizer's step, of all models: one that evaluates its loss again and again
            makes many.
        calls: training calls of the model that is called most often, on one batch or on several that the script has
            put together; 0 where none was seen.
    """

    samples: int
    losses: tuple[Tensor, ...]
    micro_batches: int
    closures: int
    calls: int = 0


class StepWatch:
    """Turns events into steps.

    Attributes:
        training_loaders: keys of the loaders whose batches were trained on.
        stepped_loaders: keys of those that gave a step that has ended its batches.
        restarted_at: when a loader began anew what was trained on then, by its key.
    """

    def __init__(self, on_step: Callable[[ScriptStep], None], training_loaders: tuple[str, ...] = ()) -> None:
        self.training_loaders: set[str] = set(training_loaders)
        self.stepped_loaders: set[str] = set()
        self.restarted_at: dict[str, float] = {}
        self._restarts: dict[str, float] = {}
        self._given = frozenset(training_loaders)
        self._doubtful: set[str] | None = None
        self._on_step = on_step
        self._fresh: dict[str, list[int]] = {}
        self._aside: dict[str, list[int]] = {}
        self._ahead: dict[str, int] = {}
        self._looks_tracked = self._awaits_backward = False
        self._was_attacked = self._has_looked = self._evaluates = False
        self._looked_at: set[str] = set()
        self._skipped: dict[str, list[int]] = {}
        self._looks_on = self._trains_on_looks = False
        self._pending: set[str] = set()
        self._yielded: dict[str, list[int]] = {}
        self._called: dict[int, list[int]] = {}
        self._losses: list[Tensor] = []
        self._depth = 0
        self._missed: dict[int, int] = {}
        self._gone: list[int] = []
        self._stepped: set[int] = set()
        self._optimizers_built = 0
        self._backwards = self._closures = 0
        self._has_gone_backward = self._has_called = False

    @property
    def _trains_unseen(self) -> bool:
        """The script has trained, and no model was seen to be called for it."""
        return self._has_gone_backward and not self._has_called

    @property
    def has_begun(self) -> bool:
        """Something is there to train: an optimizer was built, or a backward pass has ended."""
        return self._optimizers_built > 0 or self._has_gone_backward

    @property
    def is_by_hand(self) -> bool:
        """The script has built no optimizer: it changes its weights by itself."""
        return not self._optimizers_built

    def optimizer_built(self) -> None:
        """An optimizer was constructed."""
        self._optimizers_built += 1

    def loader_restarted(self, key: str, moment: float) -> None:
        """A loader that is trained from begins anew: an epoch, or an evaluation on its data."""
        self._restarts[key] = moment

    def loader_yielded(self, key: str, samples: int) -> None:
        """A loader gave a batch."""
        if self._has_looked and not self._was_attacked:  # another one before the last was trained on: an evaluation
            self._fresh.clear()
            self._evaluates = True
        self._aside, self._has_looked = {}, False
        if not torch.is_grad_enabled() and self._trains_unseen and key not in self.training_loaders:
            return  # an evaluation of what no hook sees
        if key in self._looked_at and not self._trains_on_looks:  # the same for a look in training mode
            self._skipped.setdefault(key, []).extend(self._fresh.pop(key, []))
            self._looks_on = True
        self._looked_at.discard(key)
        self._ahead.pop(key, None)
        self._fresh.setdefault(key, []).append(samples)

    def loader_ran_ahead(self, key: str, samples: int) -> None:
        """A loader gave a batch to another thread than the one that trains, which will have it some time later.

        Between two steps it gives none or several, as the threads are fast: each backward pass is taken to have one, as
        far as every model was called as often.
        """
        self._ahead[key] = samples

    @property
    def is_evaluating(self) -> bool:
        """The last outermost call was of a model in eval mode, with gradients, and no training call awaits its own.

        What goes backward then is no loss that is trained on.
        """
        return self._looks_tracked and not self._awaits_backward

    def look_at_batch(self) -> bool:
        """Hear that an outermost call in eval mode, with gradients, begins; return whether it is a part of a step.

        It is where the next batch of each loader that is trained from is all there is: an attack on what will be
        trained on.
        """
        self._looks_tracked = True
        fresh, known = self._fresh, self.training_loaders
        is_next = bool(fresh) and fresh.keys() <= known and all(len(one) == 1 for one in fresh.values())
        self._has_looked = is_next and not self._evaluates
        return self._has_looked

    def model_called(self, model: int, samples: int, *, training: bool, is_tracked: bool = False) -> None:
        """An outermost model call begins.

        Args:
            model: by its id.
            samples: that it is called with.
            training: in training mode, with gradients; else it evaluates.
            is_tracked: with gradients: where they are taken (`took_gradients`), and no other batch is fetched before a
                training call, it was a part of a step.
        """
        self._looks_tracked = is_tracked and not training
        self._awaits_backward |= training
        if not training:
            self._aside = (self._aside | self._fresh) if is_tracked else {}
            self._fresh.clear()
            self._pending.clear()
            self._restarts.clear()
            self._forget_looks()
            self._keep_known_ahead()
            return
        if self._was_attacked and not self._fresh:
            self._fresh.update(self._aside)
        self._aside = {}
        self._was_attacked = self._has_looked = self._evaluates = False
        self._has_called = True
        self._train_on()
        if self._fresh:
            self._drop_evaluated()
            self._pending = set(self._fresh)
            self._commit()
        if not self._ahead.keys() & self.training_loaders:  # else an evaluation that was left early runs ahead
            self._pending |= self._ahead.keys()
        calls = self._called.setdefault(model, [])
        if not (self._depth and calls):  # an optimizer that evaluates its loss again and again does so on one batch
            calls.append(samples)

    def model_looked(self) -> bool:
        """Hear that an outermost model call begins in training mode, without gradients; return whether it evaluates.

        It evaluates if its batch is of a loader that is not trained from, once it is known which ones are: a teacher
        or a target network is called on what its student will be trained on. Where batch after batch is looked at and
        none trained on, it evaluates as well.
        """
        if self._looks_on:
            self._restarts.clear()
        if self.training_loaders:
            self._fresh = {key: counts for key, counts in [*self._fresh.items()] if key in self.training_loaders}
            self._keep_known_ahead()
            self._looked_at = set(self._fresh)
        return self._looks_on

    def _keep_known_ahead(self) -> None:
        self._ahead = {key: samples for key, samples in [*self._ahead.items()] if key in self.training_loaders}

    def took_gradients(self) -> None:
        """Gradients were taken of what was called in eval mode: an attack on the batch, and no part of the loss."""
        self._was_attacked = True

    def went_backward(self, loss: Tensor | None) -> None:
        """A backward pass has ended."""
        self._awaits_backward = False
        self._train_on()
        if not self._called and self.has_begun:  # what is trained is called past every hook
            self._drop_evaluated()
            self._pending |= self._fresh.keys()
        self.training_loaders |= self._pending
        self._commit()
        if loss is not None and not self._is_evaluated_again():
            self._losses.append(loss)
        self._backwards += 1
        self._has_gone_backward = True
        if self._depth:
            self._closures += 1
            return
        if not self._missed and (self._optimizers_built == 0 or self._backwards > _MOST_ACCUMULATED):
            self._end_step()

    def _is_evaluated_again(self) -> bool:
        """Return whether an optimizer at work has had the losses of its batches: a line search evaluates them again."""
        batches = max(map(len, self._yielded.values()), default=1)
        return self._depth > 0 and len(self._losses) >= batches

    def optimizer_began(self) -> None:
        """A step of an optimizer begins, maybe inside another one's."""
        self._depth += 1

    def optimizer_failed(self) -> None:
        """The step of an optimizer that was begun last has raised, and the script goes on."""
        self._depth = max(0, self._depth - 1)

    def optimizer_gone(self, optimizer: int) -> None:
        """An optimizer exists no more: another one may have its number. Told in the midst of a step too."""
        self._gone.append(optimizer)

    def optimizer_ended(self, optimizer: int) -> None:
        """A step of an optimizer has ended."""
        self._depth = max(0, self._depth - 1)
        if self._depth:
            return
        while self._gone:
            gone = self._gone.pop()
            self._missed.pop(gone, None)
            self._stepped.discard(gone)
        is_new = optimizer not in self._missed
        self._missed = {one: count + 1 for one, count in self._missed.items() if count < _FORGET_AFTER}
        self._missed[optimizer] = 0
        self._stepped.add(optimizer)
        if is_new and self._backwards == 0 and len(self._missed) > 1:
            self._stepped.clear()  # it steps on the gradients of the step that the one before it has just ended
            return
        # The first step of an optimizer that joins the cycle ends it, so that cycles end where the loop's body does.
        if is_new or self._stepped >= self._missed.keys():
            self._end_step()

    def _drop_evaluated(self) -> None:
        """Drop what an evaluation took that showed by no call of a model in eval mode: many batches beside a known one.

        A second loader to train from gives no more of them than the first.
        """
        known = self._fresh.keys() & self.training_loaders
        most = max((len(self._fresh[key]) for key in known), default=0)
        if known:
            fresh = [*self._fresh.items()]
            self._fresh = {key: counts for key, counts in fresh if key in known or len(counts) <= most}

    def _train_on(self) -> None:
        """Take what was begun anew, and looked at last, for what is trained on."""
        self.restarted_at |= self._restarts
        self._restarts.clear()
        for key in self._skipped.keys() & self._looked_at:  # one look after another came before any of it was
            self._fresh[key] = [*self._skipped[key], *self._fresh.get(key, [])]
            self._trains_on_looks = True
        self._forget_looks()

    def _forget_looks(self) -> None:
        self._looked_at, self._looks_on = set(), False
        self._skipped.clear()

    def _commit(self) -> None:
        """Count what the loaders gave: it is trained on. What an evaluation takes is dropped instead."""
        while self._fresh:  # another thread may write to it, until it is known which one trains
            key, counts = self._fresh.popitem()
            self._yielded.setdefault(key, []).extend(counts)

    def _forget_idle(self) -> None:
        """Forget a loader that gave a batch before the first step, to be looked at, and none to the second step."""
        if self._doubtful is None:
            self._doubtful = self.training_loaders - self._given
        elif self._doubtful & self._yielded.keys():
            self.training_loaders -= self._doubtful - self._yielded.keys()
            self._doubtful = set()

    def _end_step(self) -> None:
        self._commit()
        calls = next(iter(self._called.values()), [])
        fewest = min([self._backwards, *map(len, self._called.values())])
        for key in self._ahead.keys() & self.training_loaders:
            self._yielded[key] = [self._ahead[key]] * max(1, fewest)
        self._forget_idle()
        keys = sorted(self.training_loaders & self._yielded.keys())
        self.stepped_loaders.update(keys)
        yielded = [self._yielded[key] for key in keys]
        batches = max(yielded, key=len, default=[]) or calls
        samples = sum(map(sum, yielded)) or sum(batches)
        most = max(map(len, self._called.values()), default=0)
        step = ScriptStep(samples, tuple(self._losses), len(batches), self._closures, calls=most)
        self._yielded.clear()
        self._called.clear()
        self._losses.clear()
        self._stepped.clear()
        self._backwards = self._closures = 0
        self._on_step(step)


class PhaseTimer:
    """Splits time among phases that may be nested: the inner one's time is not the outer one's.

    From the first optimizer step on, of its thread alone: another one that loads ahead keeps nobody waiting.

    Attributes:
        seconds: by phase.
        is_aside: the script does something else than train: phases that begin are `aside`, whatever they are.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.seconds: Counter[str] = Counter()
        self.is_aside = False
        self._now = now
        self._open: list[tuple[str, int]] = []  # by which thread
        self._since = 0.0
        self._mark: Callable[[], None] | None = None
        self._ended: list[str] = []
        self._thread: int | None = None

    def follow(self, mark: Callable[[], None] | None) -> list[str]:
        """Have every end of a phase marked as well, e.g. in a device's stream; None to stop.

        Args:
            mark: called at each end of a phase, and at once.

        Returns:
            The names of the phases that ended at the marks after the first; `other` is what is none. It grows.
        """
        self._mark, self._ended = mark, []
        if mark is not None:
            mark()
        return self._ended

    @property
    def is_between(self) -> bool:
        """The script is at work on a step, in none of its phases: what its loss is made of is computed there."""
        return not self.is_aside and not self._open

    @property
    def is_beside(self) -> bool:
        """This thread is another one than that which takes the steps."""
        return self._thread not in (None, threading.get_ident())

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        thread = threading.get_ident()
        if phase == "optimizer" and self._thread is None:
            self._thread = thread
            self._open = [one for one in self._open if one[1] == thread]  # what another has begun it does not end here
        if self.is_beside:
            return
        self._turn()
        self._open.append(("aside" if self.is_aside else phase, thread))

    def leave(self) -> None:
        """End the phase that was begun last."""
        if self.is_beside:
            return
        self._turn()
        if self._open:
            self._open.pop()

    def _turn(self) -> None:
        now = self._now()
        if self._mark is not None:
            self._ended.append(self._open[-1][0] if self._open else "other")
            self._mark()
        if self._open:
            self.seconds[self._open[-1][0]] += now - self._since  # type: ignore[assignment]
        self._since = now
