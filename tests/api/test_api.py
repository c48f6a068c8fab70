"""What Python calls: which targets and options are taken, and what is said of those that are not."""

from __future__ import annotations

import signal
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from record_factory import make_profile, make_report

import autotune
from autotune.api.targets import name_target
from autotune.errors import AutotuneError, UsageError
from autotune.probe import run as probe_stage
from autotune.records import DriftLimits, Margin
from autotune.records.script import Script
from autotune.search import run as stage
from autotune.search.run import SearchOptions
from autotune.targets.load import load_workload
from autotune.targets.resolve import DEMO_TARGET
from autotune.train import run as train_stage
from autotune.train.options import TrainingCallbacks, TrainingOptions
from autotune.train.report import StopNow


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, SearchOptions, Any]]:
    found: list[tuple[Any, SearchOptions, Any]] = []

    def search(target: Any, options: SearchOptions, *, reporter: Any, **_others: Any) -> Any:
        found.append((target, options, reporter))
        return make_profile()

    monkeypatch.setattr(stage, "run_search", search)
    return found


def test_the_package_shows_its_names() -> None:
    assert "run_search" in dir(autotune)
    assert set(dir(autotune)) == set(autotune.__all__)
    for name in autotune.__all__:
        assert getattr(autotune, name) is not None


def test_options_are_as_on_the_command_line(asked: list[Any]) -> None:
    autotune.run_search("toy.py:workload", budget="20m", max_drift=["1%", "accuracy:0.1pp"])
    autotune.run_search(budget=90.0, max_drift="0.2%")
    options = SearchOptions(budget_seconds=60.0, seed=3)
    autotune.run_search(None, options)
    (target, first, reporter), (_, second, _), (_, third, _) = asked
    assert (target, first.budget_seconds, reporter) == ("toy.py:workload", 1200.0, None)
    assert first.max_drift.loss == Margin(amount=0.01)
    assert first.max_drift.of("accuracy").amount == pytest.approx(0.001)
    assert (second.budget_seconds, second.max_drift) == (90.0, DriftLimits(loss=Margin(amount=0.002)))
    assert third == options


def test_progress_is_shown_where_nobody_listens(asked: list[Any]) -> None:
    autotune.run_search("toy.py:workload", progress=True)
    assert type(asked[0][2]).__name__ == "SearchView"


@pytest.mark.parametrize(("given", "message"), [({"budget": "20"}, "budget"), ({"max_drift": "much"}, "much")])
def test_what_does_not_parse_is_our_error(given: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        autotune.run_search("toy.py:workload", **given)  # type: ignore[arg-type]


class Workload:
    """Stands for one."""

    def build_model(self) -> None: ...

    build_optimizer = train_dataset = compute_loss = build_model


def test_an_object_is_named_by_where_it_is_held(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    held = types.ModuleType("package.training")
    held.workload = Workload()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "package.training", held)
    assert name_target(held.workload, tmp_path) == "package.training:workload"
    main = types.ModuleType("__main__")
    main.mine, main.__file__ = Workload(), str(tmp_path / "src" / "train.py")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert name_target(main.mine, tmp_path) == "src/train.py:mine"
    main.__file__ = None
    with pytest.raises(UsageError, match="defined in a session or a notebook"):
        name_target(main.mine, tmp_path)
    with pytest.raises(UsageError, match="a Workload that no module holds by a name"):
        name_target(Workload(), tmp_path)


class Half:
    """Lacks a part."""

    def build_model(self) -> None: ...


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (42, "42, of type int: no training"),
        (3.5, "no training"),
        (b"train.py:workload", "no training"),
        ({"target": "train.py:workload"}, "no training"),
        (Workload, "the class Workload"),
        (Half(), "a Half without build_optimizer"),
        ([], "no command"),
        (["python", None], "a word of the command is None"),
        ([True], "a word of the command is True"),
        ("python 'train.py", "No closing quotation"),
        (Path("train.py"), "is a script, not a workload"),
        ("train.py", "is a script, not a workload"),
        ("nothing.py:workload", "there is no file 'nothing.py'"),
    ],
)
def test_what_is_no_target_is_our_error_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: object, message: str
) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    monkeypatch.chdir(tmp_path)
    calls: dict[str, Callable[[], object]] = {
        "run_probe": lambda: autotune.run_probe(target),
        "run_search": lambda: autotune.run_search(target),
        "run_training": lambda: autotune.run_training(None, target),
    }
    refused = {name: refusal(call) for name, call in calls.items()}
    assert [name for name, (said, hint) in refused.items() if message not in said or not hint] == []
    assert [*tmp_path.iterdir()] == [tmp_path / "train.py"]


def refusal(call: Callable[[], object]) -> tuple[str, str]:
    """Return what a call says that it is refused for, and the way out; nothing where it is not."""
    try:
        call()
    except UsageError as error:
        return str(error), error.hint
    return "", ""


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SearchOptions(budget_seconds="20m"), "budget_seconds is '20m'"),  # type: ignore[arg-type]
        (lambda: SearchOptions(budget_seconds=float("nan")), "budget_seconds is nan"),
        (lambda: SearchOptions(budget_seconds=True), "budget_seconds is True"),
        (lambda: SearchOptions(max_drift="0.5%"), "max_drift is '0.5%'"),  # type: ignore[arg-type]
        (lambda: SearchOptions(memory_limit_bytes=-1), "memory_limit_bytes is -1"),
        (lambda: SearchOptions(only="num_workers"), "only is 'num_workers'"),  # type: ignore[arg-type]
        (lambda: SearchOptions(learning_rate_rule="cubic"), "learning_rate_rule is 'cubic'"),  # type: ignore[arg-type]
        (lambda: TrainingOptions(epochs="3"), "epochs is '3'"),  # type: ignore[arg-type]
        (lambda: TrainingOptions(profile=42), "profile is 42"),  # type: ignore[arg-type]
        (lambda: autotune.run_search("x.py:w", budget=[1]), r"budget is \[1\]"),  # type: ignore[arg-type]
        (lambda: autotune.run_search("x.py:w", max_drift=0.005), "max_drift is 0.005"),  # type: ignore[arg-type]
        (lambda: autotune.run_search("x.py:w", {"budget": "20m"}), "options is {'budget'"),  # type: ignore[arg-type]
        (lambda: autotune.run_search("x.py:w", folder=3), "folder is 3"),  # type: ignore[arg-type]
        (lambda: autotune.run_search("x.py:w", folder="/nowhere"), "there is no folder"),
        (lambda: autotune.run_training("train.py:workload"), "the settings come first"),
        (lambda: autotune.run_training(42), "options is 42"),  # type: ignore[arg-type]
        (lambda: autotune.run_training("nothing.json", "digits:w"), "there is no module|No such file"),
    ],
)
def test_what_is_no_option_is_our_error(build: Any, message: str) -> None:
    with pytest.raises(AutotuneError, match=message) as caught:
        build()
    assert caught.value.hint
    assert caught.value.__notes__ == [caught.value.hint]  # so that a traceback shows it


def test_lists_are_taken_for_tuples() -> None:
    assert SearchOptions(only=["num_workers"]).only == ("num_workers",)  # type: ignore[arg-type]


def test_a_probe_takes_the_same_targets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def probe(target: Any, **_others: Any) -> Any:
        asked.append(target)
        return make_report()

    monkeypatch.setattr(probe_stage, "run_probe", probe)
    report = autotune.run_probe("python train.py --lr 0.1", folder=tmp_path)
    autotune.run_probe(["python", Path("train.py"), "--epochs", 3], folder=tmp_path)
    autotune.run_probe("train.py:workload", folder=tmp_path)
    assert [getattr(one, "command", one) for one in asked] == [
        ("python", "train.py", "--lr", "0.1"),
        ("python", "train.py", "--epochs", "3"),
        "train.py:workload",
    ]
    assert repr(report) == f"<ProbeReport {report.verdict.sentence}>"


def test_a_training_begins_with_a_profile_or_its_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("workload = make()\n")
    asked: list[Any] = []

    def train(options: Any, target: Any, **_others: Any) -> Any:
        asked.append((options, target))

    monkeypatch.setattr(train_stage, "run_training", train)
    profile = autotune.Profile.of(make_profile())
    for given in ("best.json", tmp_path / "best.json", profile, None, TrainingOptions(epochs=3)):
        autotune.run_training(given, "train.py:workload", folder=tmp_path)
    assert {target for _, target in asked} == {"train.py:workload"}
    assert [options.profile for options, _ in asked] == [
        Path("best.json"), tmp_path / "best.json", profile, None, None,
    ]  # fmt: skip
    assert asked[-1][0].epochs == 3


def test_a_first_interrupt_ends_a_training_at_a_step_and_is_raised_when_it_is_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("workload = make()\n")
    over: list[bool] = []

    def train(_options: Any, _target: Any, *, callbacks: TrainingCallbacks, **_others: Any) -> None:
        assert not callbacks.should_stop()
        signal.raise_signal(signal.SIGINT)
        over.append(callbacks.should_stop())
        with pytest.raises(StopNow), callbacks.interruptible(None):
            over.append(False)

    monkeypatch.setattr(train_stage, "run_training", train)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            autotune.run_training(None, "train.py:workload", folder=tmp_path)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert over == [True]


@pytest.mark.parametrize("own", [signal.SIG_IGN, lambda _number, _frame: None], ids=["ignored", "handled"])
def test_an_interrupt_that_the_program_handles_is_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: Any
) -> None:
    (tmp_path / "train.py").write_text("workload = make()\n")

    def train(_options: Any, _target: Any, *, callbacks: TrainingCallbacks, **_others: Any) -> bool:
        signal.raise_signal(signal.SIGINT)
        return callbacks.should_stop()

    monkeypatch.setattr(train_stage, "run_training", train)
    before = signal.signal(signal.SIGINT, own)
    try:
        assert not autotune.run_training(None, "train.py:workload", folder=tmp_path)
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_warnings_of_a_training_lose_it_nothing_where_they_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TrainingCallbacks().warn("stopped at step 3")
    assert capsys.readouterr().err == "stopped at step 3\n"


def test_warnings_of_a_training_are_pythons_where_nobody_is_told() -> None:
    with pytest.warns(UserWarning, match="the run has no checkpoint"):
        TrainingCallbacks().warn("the run has no checkpoint to go on from")


@pytest.mark.parametrize("call", ["run_training(None, workload)", "run_search(workload)", "run_probe(workload)"])
def test_a_file_that_calls_us_where_it_is_imported_is_refused(tmp_path: Path, call: str) -> None:
    (tmp_path / "calls_at_its_top.py").write_text(f"import autotune\nworkload = object()\nautotune.{call}\n")
    with pytest.raises(UsageError, match="calls autotune while it is imported as the target") as caught:
        load_workload("calls_at_its_top.py:workload", folder=tmp_path)
    assert "if __name__ == '__main__'" in caught.value.hint
    assert name_target("train.py:workload", tmp_path) == "train.py:workload"


def test_a_list_of_words_is_a_scripts_command(tmp_path: Path) -> None:
    script = name_target([sys.executable, "train.py", "--epochs", "3"], tmp_path)
    assert isinstance(script, Script)
    assert script.command == (sys.executable, "train.py", "--epochs", "3")
    assert name_target(script, tmp_path) is script
    assert name_target(None, tmp_path) is None
    assert name_target("demo", tmp_path) == DEMO_TARGET
