"""The end of a training: what was expected, what came, and where it is."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import record_factory
from record_factory import make_interval
from rich.cells import cell_len
from rich.console import Console
from training_records import BEST, OUT_OF_MEMORY, PLANNED, SAFER, make_summary

from autotune.cli.pages import layout as pages
from autotune.cli.pages.training import describe_guard, describe_throughput, print_summary
from autotune.records import ProfileTarget, TrainConfig
from autotune.records.run import GuardSummary, Reverification, RunPlan, TrainingSummary

HOSTILE = "[bold]x[/bold] [/y] \x1b]0;red\nnext \u202e"


def make_plan(**changes: Any) -> RunPlan:
    fields: dict[str, Any] = {
        "target": ProfileTarget(label="train.py:gpt", fingerprint="0123456789ab"),
        "baseline_config": TrainConfig(micro_batch_size=128),
        "origin": "profile",
        "epochs": 8,
    }
    return record_factory.make_plan(PLANNED, **(fields | changes))


class Show:
    """Prints a summary as on a terminal of some width, or in a pipe, and returns what was written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def __call__(self, summary: TrainingSummary, plan: RunPlan | None = None, *, width: int | None = None) -> str:
        stream = io.StringIO()
        console = Console(
            file=stream,
            width=width,
            force_terminal=width is not None,
            color_system="standard" if width else None,
            highlight=False,
            soft_wrap=width is None,
            _environ={"TERM": "xterm-256color"},
        )
        self._monkeypatch.setattr(pages, "result_console", lambda: console)
        print_summary(summary, plan)
        return re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Show:
    return Show(monkeypatch)


def sections(shown: str) -> list[str]:
    return [line.partition(" (")[0] for line in shown.splitlines() if line and not line.startswith(" ")]


def test_a_finished_training_tells_what_came_of_it(show: Show) -> None:
    shown = show(make_summary(), make_plan())
    assert sections(shown) == ["trained", "expected and measured", "time", "next"]
    for line in (
        "trained (train.py:gpt)",
        "  trained 30,000 steps, 3,840,000 samples: loss 1.7321",
        "  bits_per_byte   1.1911",
        "  best            bits_per_byte 1.1911 at step 30,000",
        "expected and measured (settings: profile)",
        "  throughput      as expected (1.02x): 12,480 samples/s, the search measured 12,200",
        "  settings        as asked for: micro_batch=64 accumulation=2 precision=bf16 "
        "compile=default workers=8 pin_memory=True",
        "time (6m12s in this session)",
        "  machine         data wait 2 %",
        "  machine         MFU 41 %",
        "  machine         peak memory 33.4 GiB",
        "  checkpoint      runs/gpt-001/checkpoints/step-00030000",
        "  compare         autotune compare runs/gpt-001 ANOTHER-RUN",
    ):
        assert f"{line}\n" in shown
    for part, amount in (("steps", "5m08s 83 %"), ("evaluation", "41s 11 %"), ("checkpoints", "12s  3 %")):
        assert re.search(rf"where it went +{part} +{amount}\n", shown)
    assert re.search(r"where it went +set-up, rest +11s  3 %\n", shown)


def test_a_stopped_training_says_how_it_stepped_down_and_how_to_go_on(show: Show) -> None:
    resume = "stopped at step 12000; go on with --resume --run-dir runs/gpt-001"
    summary = make_summary(
        finished=False,
        config=SAFER,
        step_downs=(OUT_OF_MEMORY,),
        warnings=(resume, resume),
        samples_per_second=11_100.0,
        best=BEST,
        skipped_steps=1,
        allocator_retries=2,
    )
    shown = show(summary, make_plan())
    assert sections(shown) == ["stopped", "steps down", "expected and measured", "time", "notes", "next"]
    assert f"oom-device                 went on from step 4,000: {OUT_OF_MEMORY.sentence}\n" in shown
    assert "not as asked for: micro_batch 64 -> 32, accumulation 2 -> 4\n" in shown
    assert "slower than expected (0.91x): 11,100 samples/s, the search measured 12,200\n" in shown
    assert shown.count(resume) == 1
    assert f"  best            {BEST.checkpoint}\n" in shown
    assert "1 skipped step\n" in shown
    assert "2 allocator retries\n" in shown
    assert "ANOTHER-RUN" not in shown


def test_a_run_in_this_folder_is_named_from_here(show: Show, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    shown = show(make_summary(folder=str(tmp_path / "runs" / "a")))
    assert "autotune compare runs/a ANOTHER-RUN\n" in shown
    assert "autotune compare /elsewhere/a ANOTHER-RUN\n" in show(make_summary(folder="/elsewhere/a"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"promised_samples_per_second": None}, "12,480 samples/s; the search did not measure these settings"),
        ({"samples_per_second": None}, "not compared: no step was taken"),
        (
            {"samples_per_second": 15_000.0},
            "faster than expected (1.23x): 15,000 samples/s, the search measured 12,200",
        ),
        (
            {"samples_per_second": 15_000.0, "promised_noise": 0.118},
            "as expected, within the noise (1.23x): 15,000 samples/s, the search measured 12,200; its launches "
            "differed by 11.8 %",
        ),
    ],
)
def test_a_throughput_is_held_against_what_was_promised(changes: dict[str, Any], words: str) -> None:
    assert describe_throughput(make_summary(**changes)) == words


@pytest.mark.parametrize(
    ("guard", "words"),
    [
        (None, "not compared: a script's training is not guarded"),
        (GuardSummary(is_on=False), "nothing to guard: these are your own numerics"),
        (GuardSummary(is_on=False, reason="the loss has no gradient"), "nothing to guard: the loss has no gradient"),
        (GuardSummary(is_on=True), "not looked at"),
        (
            GuardSummary(is_on=True, gradient_checks=1, last_clean_step=50),
            "as expected up to step 50: 1 gradient checked against your own numerics",
        ),
        (
            GuardSummary(is_on=True, gradient_checks=7, alarms=1, cost_fraction=0.0041, reason="only the loss"),
            "not as expected: rolled back 1 time, 7 gradients checked against your own numerics, 0.4 % of the time; "
            "only the loss",
        ),
    ],
)
def test_the_drift_guard_says_what_it_saw(guard: GuardSummary | None, words: str) -> None:
    assert describe_guard(guard) == words


def test_a_second_look_at_a_foreign_profile_is_told(show: Show) -> None:
    look = Reverification(
        differences=("the GPU is another",),
        speedup=make_interval(1.2, 1.1, 1.3, confidence_level=0.95),
        pairs=3,
        trusted=True,
        reason="it is still at least 1.10x faster here",
    )
    shown = show(make_summary(reverification=look), make_plan())
    assert "  the GPU is another\n  it is still at least 1.10x faster here\n" in shown


def test_a_training_that_took_no_step_has_a_summary_too(show: Show) -> None:
    summary = TrainingSummary(
        folder="runs/a",
        checkpoint="runs/a/checkpoints/step-00000000",
        finished=False,
        steps=0,
        epochs=0,
        samples=0,
        loss=None,
        metrics={"error": None},
        samples_per_second=None,
        promised_samples_per_second=None,
        elapsed_seconds=0.0,
    )
    shown = show(summary)
    assert "trained 0 steps, 0 samples: loss -\n" in shown
    assert "  error           not finite\n" in shown
    assert "where it went" not in shown
    assert "None" not in shown


@pytest.mark.parametrize("elapsed", [372.0, 100.0])
def test_the_parts_of_the_time_make_a_whole(show: Show, elapsed: float) -> None:
    shown = show(make_summary(elapsed_seconds=elapsed))
    shares = [int(share) for share in re.findall(r"where it went.* (\d+) %", shown)]
    assert 98 <= sum(shares) <= 102
    assert ("set-up, rest" in shown) == (elapsed > 361.0)  # a resumed run: its parts are of all sessions


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100])
def test_a_terminal_of_any_width_shows_it_all(show: Show, width: int) -> None:
    target = ProfileTarget(label=HOSTILE, fingerprint="0123456789ab")
    summary = make_summary(target=target, metrics={HOSTILE: 1.0}, step_downs=(OUT_OF_MEMORY,), warnings=(HOSTILE,))
    shown = show(summary, make_plan(), width=width)
    assert max(cell_len(line) for line in shown.splitlines()) <= width
    assert "\x1b" not in shown
    assert "\u202e" not in show(summary, make_plan())
    if width >= 60:
        assert "as expected (1.02x)" in shown


def test_weights_for_other_tools_come_with_how_to_load_them(show: Show) -> None:
    assert "safetensors" not in show(make_summary())
    shown = show(make_summary(weights="runs/gpt-001/model.safetensors"))
    assert "  weights         runs/gpt-001/model.safetensors\n" in shown
    assert "  weights         load them with safetensors.torch.load_model(model, FILE)\n" in shown
