"""The supervisor of a training over its processes, which are played here; what it asks a way in is what it may do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from record_factory import make_plan

from autotune.records.config import TrainConfig
from autotune.records.training_process import TrainingProgress
from autotune.train.policy import TrainPolicy
from autotune.train.recovery.attempts import Ended, Start
from autotune.train.recovery.steps_down import Choice, Fault, make_step_down, workload_knobs
from autotune.train.recovery.supervisor import Death, Decision, Supervisor
from autotune.train.runs.folder import RunFolder
from autotune.train.script.progress import read_progress, write_progress

CONFIG = TrainConfig(micro_batch_size=8)
PLAN = make_plan(CONFIG)


@dataclass
class Played:
    """A way in whose processes all run out of memory; `decide` allows so many more of them."""

    folder: RunFolder
    allowed: int
    writes_itself: bool = False
    given_up: list[str] = field(default_factory=list)

    def start(self, attempt: int) -> Start:
        return Start([str(attempt)], {})

    def read_death(self, ended: Ended) -> Death | None:
        if ended.status == 0:
            return None
        fault, written = Fault("oom-host", "no memory", 3), None
        if self.writes_itself:
            written = make_step_down(fault, Choice("again", CONFIG), resumed_step=3, sentence="by itself")
        return Death(ended.attempt, fault, self.folder, workload_knobs(), 3, written)

    def decide(self, death: Death, choice: Choice | None) -> Decision:
        if choice is None or death.attempt >= self.allowed:
            return Decision(None, "enough of it")
        return Decision(choice, f"{choice.action} after {death.attempt}")

    def give_up(self, _death: Death, reason: str) -> None:
        self.given_up.append(reason)


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Played, list[str], int]]:
    def run(*statuses: int, **options: Any) -> tuple[Played, list[str], int]:
        def run_attempts(
            start: Callable[[int], Start], *, next_attempt: Callable[[Ended], bool], **_options: Any
        ) -> Ended:
            for number, status in enumerate(statuses):
                assert start(number).words == [str(number)]
                ended = Ended(number, status, False, 0, 1.0)
                if not next_attempt(ended):
                    break
            return ended

        monkeypatch.setattr("autotune.train.recovery.supervisor.run_attempts", run_attempts)
        said: list[str] = []
        played = Played(RunFolder(options.pop("folder", tmp_path), PLAN), **options)
        return played, said, Supervisor(played, said.append).run().attempt

    return run


def test_each_death_is_a_step_down_in_the_plan_until_it_is_enough(play: Callable[..., Any]) -> None:
    played, said, attempt = play(-9, -9, -9, 0, allowed=2)
    downs = played.folder.plan.step_downs
    assert [(down.action, down.step, down.resumed_step) for down in downs] == [("fewer-samples", 3, 3)] * 2
    assert [down.config.micro_batch_size for down in downs] == [4, 2]
    assert said == [down.sentence for down in downs] == ["fewer-samples after 0", "fewer-samples after 1"]
    assert (played.given_up, attempt) == (["enough of it"], 2)


def test_what_a_process_wrote_itself_is_not_written_twice(play: Callable[..., Any]) -> None:
    played, said, attempt = play(75, 0, allowed=2, writes_itself=True)
    assert (played.folder.plan.step_downs, said, played.given_up, attempt) == ((), [], [], 1)


def test_a_plan_that_cannot_be_written_is_the_end(play: Callable[..., Any], tmp_path: Path) -> None:
    played, said, attempt = play(-9, 0, allowed=2, folder=tmp_path / "gone")
    assert (said, attempt) == ([], 0)
    assert "No such file or directory" in played.given_up[0]


def test_every_threshold_says_what_it_is() -> None:
    assert TrainPolicy.__doc__ is not None
    for one in dataclasses.fields(TrainPolicy):
        assert f"\n        {one.name}: " in TrainPolicy.__doc__


@pytest.mark.parametrize(
    "content",
    [
        "{",
        '{"steps": true}',
        '{"steps": -1}',
        '{"rank": "0"}',
        '{"unknown": 1}',
        '{"loss": NaN}',
        '{"failure": {"cause": "no cause of ours", "detail": "", "at": 1.0}}',
        '{"eager_detail": "' + "x" * 70_000 + '"}',
    ],
)
def test_a_progress_file_that_a_script_has_spoiled_is_left_out(tmp_path: Path, content: str) -> None:
    write_progress(tmp_path, TrainingProgress(rank=1, steps=4))
    (tmp_path / "progress-0.json").write_text(content)
    assert read_progress(tmp_path) == [TrainingProgress(rank=1, steps=4)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["progress-0.json", "progress-1.json"]
