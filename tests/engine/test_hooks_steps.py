"""Steps learned from events alone: each test is the loop of some script, written as what the hooks hear of it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from autotune.engine.hooks.steps import PhaseTimer, ScriptStep, StepWatch


class Story:
    """The events of a script, and the steps found in them.

    Attributes:
        steps: found so far.
        watch: under test.
    """

    def __init__(self, *optimizers: str, training_loaders: tuple[str, ...] = ()) -> None:
        self.steps: list[ScriptStep] = []
        self.watch = StepWatch(self.steps.append, training_loaders)
        self._numbers: dict[str, int] = {}
        for name in optimizers:
            self.build(name)

    def build(self, name: str) -> None:
        self.watch.optimizer_built()
        self._numbers[name] = len(self._numbers)

    def load(self, samples: int, key: str = "train") -> None:
        self.watch.loader_yielded(key, samples)

    def call(self, samples: int = 8, model: int = 0) -> None:
        self.watch.model_called(model, samples, training=True)

    def validate(self, *samples: int, key: str = "validation") -> None:
        for count in samples:
            self.load(count, key)
            self.watch.model_called(0, count, training=False)

    def backward(self, loss: float | None = 1.0) -> None:
        self.watch.went_backward(None if loss is None else torch.tensor(loss))

    def step(self, name: str) -> None:
        self.begin()
        self.end(name)

    def begin(self) -> None:
        self.watch.optimizer_began()

    def end(self, name: str) -> None:
        self.watch.optimizer_ended(self._numbers[name])

    @property
    def counts(self) -> list[tuple[int, int]]:
        """Samples and micro batches of each step."""
        return [(step.samples, step.micro_batches) for step in self.steps]

    @property
    def losses(self) -> list[list[float]]:
        return [[float(loss) for loss in step.losses] for step in self.steps]


def test_one_optimizer_ends_a_step_each_time() -> None:
    story = Story("sgd")
    for loss, samples in ((3.0, 8), (2.0, 8), (1.0, 5)):
        story.load(samples)
        story.call(samples)
        story.backward(loss)
        story.step("sgd")
    assert story.counts == [(8, 1), (8, 1), (5, 1)]
    assert story.losses == [[3.0], [2.0], [1.0]]
    assert story.watch.training_loaders == {"train"}


def test_accumulated_micro_batches_are_one_step() -> None:
    story = Story("sgd")
    for number in range(6):
        story.load(8)
        story.call()
        story.backward(float(number))
        if number % 3 == 2:
            story.step("sgd")
    assert story.counts == [(24, 3), (24, 3)]
    assert story.losses == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_without_a_loader_the_models_calls_are_counted() -> None:
    story = Story("sgd")
    for _ in range(2):
        for samples in (8, 7):
            story.call(samples)
            story.backward()
        story.step("sgd")
    assert story.counts == [(15, 2), (15, 2)]
    assert story.watch.training_loaders == set()


def test_of_several_models_without_a_loader_the_first_counts() -> None:
    story = Story("sgd")
    for _ in range(2):
        story.call(8, model=5)
        story.call(64, model=3)
        story.call(8, model=4)
        story.backward()
        story.step("sgd")
    assert story.counts == [(8, 1), (8, 1)]


def play_gan(story: Story, times: int) -> None:
    for _ in range(times):
        story.load(8)
        for loss in (1.0, 2.0):
            story.call(model=1)
            story.backward(loss)
        story.step("critic")
        story.call(model=2)
        story.backward(4.0)
        story.step("generator")


def test_two_optimizers_that_take_turns_are_one_step_together() -> None:
    story = Story("critic", "generator")
    play_gan(story, 4)
    # Only after its first round is it known that there are two.
    assert story.losses == [[1.0, 2.0], [4.0]] + [[1.0, 2.0, 4.0]] * 3
    assert story.counts[2:] == [(8, 1)] * 3


def test_three_steps_of_the_critic_and_one_of_the_generator_are_one_step() -> None:
    story = Story("critic", "generator")
    for _ in range(4):
        for name, loss in (("critic", 1.0), ("critic", 2.0), ("critic", 3.0), ("generator", 4.0)):
            if name == "critic":
                story.load(8)
            story.call()
            story.backward(loss)
            story.step(name)
    assert story.losses == [[1.0], [2.0], [3.0], [4.0]] + [[1.0, 2.0, 3.0, 4.0]] * 3
    assert story.counts[4:] == [(24, 3)] * 3


def test_two_optimizers_after_one_backward_pass_are_one_step() -> None:
    story = Story("sparse", "dense")
    for _ in range(4):
        story.load(8)
        story.call()
        story.backward()
        story.step("sparse")
        story.step("dense")
    assert story.losses == [[1.0]] * 4
    assert story.counts == [(8, 1)] * 4


def test_an_optimizer_that_joins_late_changes_the_cycle_and_not_the_loop() -> None:
    story = Story("head", "body")
    for number in range(6):
        story.load(8)
        story.call()
        story.backward(float(number))
        story.step("head")
        if number >= 3:  # the body is frozen in the first epochs
            story.step("body")
    assert [len(losses) for losses in story.losses] == [1, 1, 1, 1, 1, 1]
    assert story.losses[-1] == [5.0]


def test_an_optimizer_that_takes_no_part_any_more_is_forgotten() -> None:
    story = Story("critic", "generator")
    play_gan(story, 3)
    before = len(story.steps)
    for number in range(100):
        story.load(8)
        story.call()
        story.backward(float(number))
        story.step("critic")
    late = story.steps[before:]
    assert len(late[0].losses) > 10  # it was waited for
    assert [len(step.losses) for step in late[1:]] == [1] * (len(late) - 1)
    assert len(late) > 30
    assert sum(step.samples for step in late) == 800


def test_an_optimizer_that_was_built_and_never_steps_is_not_waited_for() -> None:
    story = Story("unused", "sgd")
    for _ in range(3):
        story.load(8)
        story.call()
        story.backward()
        story.step("sgd")
    assert story.counts == [(8, 1)] * 3


def test_a_step_inside_a_step_is_a_part_of_it() -> None:
    story = Story("inner", "outer")
    for number in range(3):
        story.load(8)
        story.call()
        story.backward()
        story.begin()
        story.begin()
        story.end("inner")
        assert len(story.steps) == number
        story.end("outer")
    assert story.counts == [(8, 1)] * 3


def test_a_closure_that_is_called_twice_sees_one_batch() -> None:
    story = Story("sam")
    for _ in range(2):
        story.load(8)
        story.begin()
        for loss in (1.0, 2.0):
            story.call()
            story.backward(loss)
        story.end("sam")
    assert story.counts == [(8, 1)] * 2
    assert story.losses == [[1.0]] * 2


def test_many_calls_inside_one_step_are_one_batch_even_without_a_loader() -> None:
    story = Story("lbfgs")
    for _ in range(2):
        story.begin()
        for loss in range(20):
            story.call(1400)
            story.backward(float(loss))
        story.end("lbfgs")
    assert story.counts == [(1400, 1)] * 2
    assert story.losses == [[0.0]] * 2
    assert [step.closures for step in story.steps] == [20] * 2


def test_a_closure_of_many_micro_batches_counts_what_the_loader_gave() -> None:
    story = Story("lbfgs")
    story.begin()
    for samples in (8, 8, 5):
        story.load(samples)
        story.call(samples)
        story.backward()
    story.end("lbfgs")
    assert story.counts == [(21, 3)]
    assert story.losses == [[1.0] * 3]


def test_after_a_step_that_raised_steps_are_seen_again() -> None:
    story = Story("adam")
    for fails in (True, False, False):
        story.load(8)
        story.call()
        story.backward()
        story.begin()
        if fails:
            story.watch.optimizer_failed()
        else:
            story.end("adam")
    assert story.counts == [(16, 2), (8, 1)]


def test_an_optimizer_that_is_gone_is_not_waited_for() -> None:
    """A script may train one model after another, each with an optimizer of its own."""
    story = Story("first", "second")
    for name in ["first"] * 10 + ["second"] * 10:
        if name == "second":
            story.watch.optimizer_gone(0)
        story.load(8)
        story.call()
        story.backward()
        story.step(name)
    assert story.counts == [(8, 1)] * 20


def test_without_any_optimizer_a_backward_pass_ends_a_step() -> None:
    story = Story()
    for loss in (3.0, 2.0):
        story.load(8)
        story.call()
        story.backward(loss)
    assert story.counts == [(8, 1)] * 2
    assert story.losses == [[3.0], [2.0]]


def test_an_optimizer_of_no_use_does_not_keep_a_training_by_hand_from_being_seen() -> None:
    story = Story("ornament")
    for _ in range(1100):
        story.call()
        story.backward()
    assert len(story.steps) >= 1
    story.step("ornament")  # it does take part, and from now on it counts
    steps = len(story.steps)
    story.call()
    story.backward()
    assert len(story.steps) == steps


def test_a_few_backward_passes_before_the_first_step_end_no_step() -> None:
    story = Story("sgd")
    for _ in range(32):
        story.load(8)
        story.call()
        story.backward()
    assert story.steps == []
    story.step("sgd")
    assert story.counts == [(256, 32)]


def test_many_backward_passes_before_the_first_step_end_no_step() -> None:
    story = Story("sgd")
    for number in range(256):
        story.load(8)
        story.call()
        story.backward()
        if number % 128 == 127:
            story.step("sgd")
    assert story.counts == [(1024, 128)] * 2


def test_two_backward_passes_are_two_losses_of_one_step() -> None:
    story = Story("adam")
    for _ in range(2):
        story.load(8)
        story.call(model=1)
        story.backward(1.5)
        story.call(model=2)
        story.backward(0.5)
        story.step("adam")
    assert story.counts == [(8, 1)] * 2
    assert story.losses == [[1.5, 0.5]] * 2


def test_a_backward_pass_from_no_scalar_has_no_loss_and_still_counts() -> None:
    story = Story("sgd")
    story.load(8)
    story.call()
    story.backward(None)
    story.step("sgd")
    assert story.losses == [[]]
    assert story.counts == [(8, 1)]


@pytest.mark.parametrize("first", [True, False], ids=["validated before", "validated after"])
def test_the_validation_loader_is_told_from_the_training_one(first: bool) -> None:
    story = Story("sgd")
    for _ in range(3):
        if first:
            story.validate(100, 100, 60)
        for _ in range(2):
            story.load(8)
            story.call()
            story.backward()
            story.step("sgd")
        if not first:
            story.validate(100, 100, 60)
    assert story.watch.training_loaders == {"train"}
    assert story.counts == [(8, 1)] * 6


def test_an_evaluation_on_the_training_loader_is_no_training() -> None:
    story = Story("sgd")
    for _ in range(2):
        for _ in range(2):
            story.load(8)
            story.call()
            story.backward()
            story.step("sgd")
        story.validate(8, 8, key="train")
    assert story.counts == [(8, 1)] * 4


def test_an_evaluation_on_the_training_loader_begins_no_epoch() -> None:
    story = Story("sgd")
    for epoch in range(3):
        for number in range(2):
            if epoch and not number:
                story.watch.loader_restarted("train", 10.0 * epoch)
            story.load(8)
            story.call()
            story.backward()
            story.step("sgd")
            story.watch.loader_restarted("train", 10.0 * epoch + 5.0)
            story.validate(8, 8, key="train")
            assert story.watch.restarted_at == ({"train": 10.0 * epoch} if epoch else {})


def test_a_batch_fetched_ahead_of_its_use_is_counted_once() -> None:
    story = Story("sgd")
    story.load(8)
    for number in range(6):
        if number == 3:
            story.validate(100)
        story.call()
        story.load(8)  # while the device is busy
        story.backward()
        story.step("sgd")
    assert story.watch.training_loaders == {"train"}
    assert sum(step.samples for step in story.steps) == 7 * 8
    assert story.counts[1:] == [(8, 1)] * 5


def test_a_batch_that_nothing_was_trained_on_makes_no_training_loader() -> None:
    story = Story("sgd")
    story.load(100, "statistics")  # looked at before the training
    story.validate(50)
    story.load(8)
    story.call()
    story.backward()
    story.step("sgd")
    assert story.watch.training_loaders == {"train"}


def test_a_batch_that_was_looked_at_before_the_training_makes_no_training_loader() -> None:
    story = Story("sgd")
    story.load(40, key="check")
    for _ in range(3):
        story.load(8)
        story.call()
        story.backward()
        story.step("sgd")
    assert story.watch.training_loaders == {"train"}
    assert story.counts[1:] == [(8, 1), (8, 1)]


def test_a_loader_that_takes_part_in_few_steps_is_found_again() -> None:
    story = Story("sgd")
    for step in range(5):
        story.load(8)
        if step % 3 == 0:
            story.load(4, key="unlabelled")
        story.call()
        story.backward()
        story.step("sgd")
    assert story.watch.training_loaders == {"train", "unlabelled"}
    assert [samples for samples, _ in story.counts] == [12, 8, 8, 12, 8]


def test_known_training_loaders_are_kept_though_one_gives_nothing() -> None:
    story = Story("sgd", training_loaders=("train", "unlabelled"))
    for _ in range(3):
        story.load(8)
        story.call()
        story.backward()
        story.step("sgd")
    assert story.watch.training_loaders == {"train", "unlabelled"}


def test_two_training_loaders_give_a_step_their_samples_together() -> None:
    story = Story("sgd")
    for _ in range(3):
        story.load(8, "labelled")
        story.load(56, "unlabelled")
        story.call(64)
        story.backward()
        story.step("sgd")
    assert story.watch.training_loaders == {"labelled", "unlabelled"}
    assert story.counts == [(64, 1)] * 3


def test_a_loader_that_gives_a_step_more_batches_says_how_many_there_were() -> None:
    story = Story("sgd")
    for _ in range(2):
        story.load(16, "replay")
        for _ in range(3):
            story.load(8)
            story.call()
            story.backward()
        story.step("sgd")
    assert story.counts[1] == (16 + 24, 3)


def test_batches_that_the_script_puts_together_are_one_call() -> None:
    story = Story("sgd")
    for _ in range(2):
        for _ in range(16):
            story.load(1)
        story.call(16)
        story.backward()
        story.step("sgd")
    assert story.counts == [(16, 16)] * 2
    assert [step.calls for step in story.steps] == [1] * 2


def test_known_training_loaders_count_from_the_first_batch() -> None:
    story = Story("sgd", training_loaders=("train",))
    assert story.watch.training_loaders == {"train"}
    story.load(8)
    story.load(4, "other")
    story.step("sgd")
    assert story.counts == [(8, 1)]


@pytest.mark.parametrize(
    ("calls", "backwards", "batches"),
    [([0], 1, 1), ([0, 0], 2, 2), ([0, 0], 1, 1), ([0, 0, 1, 0], 3, 1)],
    ids=["one model", "two micro batches", "two views", "a discriminator and a generator"],
)
def test_batches_that_another_thread_fetches_are_counted_by_what_is_trained(
    calls: list[int], backwards: int, batches: int
) -> None:
    story = Story("sgd", training_loaders=("train",))
    for fetched in (2, 0, 1, 0, 2):
        for _ in range(fetched):
            story.watch.loader_ran_ahead("train", 8)
        for model in calls:
            story.call(3, model)
        for _ in range(backwards):
            story.backward()
        story.step("sgd")
    assert story.counts == [(8 * batches, batches)] * 5


def test_a_loader_that_another_thread_fetches_from_is_found() -> None:
    story = Story("sgd")
    story.watch.loader_ran_ahead("validation", 50)
    story.watch.model_called(0, 50, training=False)
    for fetched in (2, 0, 1):
        for _ in range(fetched):
            story.watch.loader_ran_ahead("train", 8)
        story.call()
        story.backward()
        story.step("sgd")
        story.watch.loader_ran_ahead("validation", 50)
        story.watch.model_called(0, 50, training=False)
        story.watch.loader_ran_ahead("validation", 50)  # one more than the evaluation takes
    assert story.watch.training_loaders == {"train"}
    assert story.counts == [(8, 1)] * 3


def test_a_loader_whose_batches_no_model_is_seen_to_be_called_with_is_trained_from() -> None:
    story = Story()
    story.load(100, "looked at")
    story.backward()  # before anything is trained
    for _ in range(3):
        story.load(8)
        story.backward()
        story.validate(50)
    assert story.watch.training_loaders == {"train"}
    assert story.counts[1:] == [(8, 1)] * 3


def test_an_evaluation_of_what_no_hook_sees_is_no_training() -> None:
    story = Story("sgd")
    for _ in range(3):
        for _ in range(2):
            story.load(8)
            story.backward()
            story.step("sgd")
        with torch.no_grad():
            for _ in range(5):
                story.load(8, "validation")
    assert story.counts == [(8, 1)] * 6
    assert story.watch.training_loaders == {"train"}


def test_batches_that_are_all_looked_at_before_all_are_trained_on_are_of_one_step() -> None:
    """As CLIP with a large batch in parts: features of all without gradients first."""
    story, evaluated = Story("sgd"), []
    for _ in range(4):
        for _ in range(3):
            story.load(8)
            evaluated.append(story.watch.model_looked())
        for _ in range(3):
            story.call()
            story.backward()
        story.step("sgd")
    assert story.counts == [(24, 3)] * 4
    assert not any(evaluated[6:])


def test_steps_in_a_row_share_nothing() -> None:
    story = Story("sgd")
    story.load(8)
    story.call()
    story.backward(1.0)
    story.step("sgd")
    story.step("sgd")
    assert story.counts == [(8, 1), (0, 0)]
    assert story.losses == [[1.0], []]


def split(events: Iterable[tuple[float, str]]) -> dict[str, Any]:
    """Return the seconds of each phase; an event is a moment and the phase that begins then, or nothing for an end."""
    events = list(events)
    moments = iter([moment for moment, _ in events])
    timer = PhaseTimer(lambda: next(moments))
    for _, phase in events:
        if phase:
            timer.enter(phase)
        else:
            timer.leave()
    return dict(timer.seconds)


def test_phases_one_after_another_take_what_they_take() -> None:
    assert split([(1, "data"), (3, ""), (4, "forward"), (8, ""), (10, "data"), (11, "")]) == {"data": 3, "forward": 4}


def test_an_inner_phase_is_not_the_outer_ones_time() -> None:
    events = [(0, "optimizer"), (1, "forward"), (3, ""), (4, "backward"), (8, ""), (16, "")]
    assert split(events) == {"optimizer": 1 + 1 + 8, "forward": 2, "backward": 4}


def test_a_phase_in_itself_counts_once() -> None:
    assert split([(0, "data"), (1, "data"), (3, ""), (7, "")]) == {"data": 7}


def test_a_phase_that_is_still_open_has_only_what_is_over() -> None:
    assert split([(0, "forward"), (2, "backward")]) == {"forward": 2}


def test_what_begins_while_a_script_does_not_train_is_aside() -> None:
    clock = itertools.count()
    timer = PhaseTimer(lambda: next(clock))
    for is_aside in (False, True, True, False):
        timer.is_aside = is_aside
        timer.enter("data")
        timer.leave()
    assert timer.seconds == {"data": 2, "aside": 2}


def test_a_thread_that_loads_ahead_keeps_nobody_waiting_once_steps_are_taken_elsewhere() -> None:
    clock = itertools.count()
    timer = PhaseTimer(lambda: next(clock))

    def load() -> None:
        timer.enter("data")
        timer.leave()

    def load_elsewhere() -> None:
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()

    load()
    load_elsewhere()
    assert timer.seconds == {"data": 2}
    timer.enter("optimizer")
    load_elsewhere()
    timer.leave()
    assert timer.seconds == {"data": 2, "optimizer": 1}
    load()
    assert timer.seconds["data"] == 3


def test_an_end_without_a_beginning_is_no_error() -> None:
    assert split([(0, ""), (1, "data"), (2, ""), (3, "")]) == {"data": 1}


def test_phases_add_up_to_the_whole() -> None:
    clock = itertools.count(0.0, 0.25)
    timer = PhaseTimer(lambda: next(clock))
    began = next(clock)
    timer.enter("data")
    for phase in ("forward", "backward", "optimizer") * 5:
        timer.enter(phase)
        timer.enter("data")
        timer.leave()
        timer.leave()
    timer.leave()
    assert sum(timer.seconds.values()) == next(clock) - began - 2 * 0.25


def test_ends_of_phases_are_marked_in_order_while_they_are_followed() -> None:
    timer, marks = PhaseTimer(lambda: 0.0), []
    timer.enter("early")
    timer.leave()
    names = timer.follow(lambda: marks.append(len(marks)))
    timer.enter("data")
    timer.leave()
    timer.enter("backward")
    timer.enter("optimizer")
    timer.leave()
    timer.leave()
    assert names == ["other", "data", "other", "backward", "optimizer", "backward"]
    assert len(marks) == 1 + len(names)
    timer.follow(None)
    timer.enter("late")
    assert len(marks) == 7
