"""What `autotune search` makes of its options and of the settings file."""

from __future__ import annotations

from pathlib import Path

import pytest
from record_factory import make_interval, make_profile

from autotune.cli.pages.answer import print_answer
from autotune.cli.search import read_options
from autotune.cli.target import read_target
from autotune.errors import UsageError
from autotune.machine.hardware import read_hardware, read_software
from autotune.records import DriftLimits, Evidence, Margin, ProfileTarget, TrainConfig
from autotune.records.script import Script
from autotune.search.run import SearchOptions
from autotune.targets.drift_limits import GivenLimits

NOTHING: dict[str, str | None] = {"budget": None, "memory_limit": None, "out": None}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("from elsewhere import *\n")
    return tmp_path


def read(max_drift: tuple[str, ...] = (), *, loss: str | None = None, metrics: tuple[str, ...] = ()) -> SearchOptions:
    return read_options(NOTHING, limits=GivenLimits(loss, metrics, max_drift), seed=0, resume=False, force=False)


def test_without_anything_the_defaults_hold() -> None:
    assert read() == SearchOptions()
    assert SearchOptions().max_drift == DriftLimits()


def test_limits_that_are_typed_replace_those_of_the_settings(folder: Path) -> None:
    (folder / "autotune.toml").write_text('max_drift = ["1%", "accuracy:0.1pp"]')
    from_file = DriftLimits(loss=Margin(amount=0.01), metrics={"accuracy": Margin(amount=0.001, unit="absolute")})
    assert read().max_drift == from_file
    assert read(("2%",)).max_drift == DriftLimits(loss=Margin(amount=0.02))
    (folder / "autotune.toml").write_text('max_drift = "1"')
    with pytest.raises(UsageError, match=r"autotune\.toml: max_drift '1' is a number without a unit"):
        read()
    (folder / "autotune.toml").write_text('max_loss_increase = "1%"\nmetric_limit = "accuracy=0.1pp"')
    assert read().max_drift == from_file.replace(metric=Margin(amount=0.005))
    assert read(loss="2%").max_drift == from_file.replace(loss=Margin(amount=0.02), metric=Margin(amount=0.005))
    assert read(metrics=("kappa=1%",)).max_drift.metrics == {"kappa": Margin(amount=0.01)}
    (folder / "autotune.toml").write_text('metric_limit = "accuracy=1"')
    with pytest.raises(UsageError, match=r"autotune\.toml: metric_limit 'accuracy=1' is a number without a unit"):
        read()


def test_metrics_of_a_script_are_read_in_order() -> None:
    script = read_target(
        ["python", "train.py"],
        metric_regexes=["acc=(.*)"],
        metric_keys=["loss", "kappa"],
        directions=["maximize", "minimize", "maximize"],
    )
    assert isinstance(script, Script)
    assert [(metric.name, metric.direction) for metric in script.metrics] == [
        ("acc", "maximize"),
        ("loss", "minimize"),
        ("kappa", "maximize"),
    ]


@pytest.mark.parametrize("name", ["metric_regexes", "metric_keys", "directions"])
def test_metrics_are_for_scripts(name: str) -> None:
    with pytest.raises(UsageError, match="is for a script, and none was named"):
        read_target(["train.py:workload"], **{name: ["minimize"]})
    assert read_target(["train.py:workload"], **{name: []}) == "train.py:workload"


@pytest.mark.fault("F15", injected="escape sequences in names, values and notes", outcome="printed as question marks")
def test_an_answer_shows_nothing_that_a_terminal_would_obey(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names and values of a workload's own knobs, and the notes, were printed as they came."""
    evil = "a\x1b[2J\x07\x9b31m"
    config = TrainConfig(user_knobs={f"name{evil}": f"new{evil}"})
    answer = make_profile(
        verdict="keep",
        config=config,
        baseline_config=TrainConfig(user_knobs={f"name{evil}": f"old{evil}"}),
        candidate_config=config,
        speedup=make_interval(1.0, method="none"),
        target=ProfileTarget(label="train.py:workload", fingerprint="m-0123456789ab"),
        hardware=read_hardware(),
        software=read_software(),
        evidence=Evidence(baseline_samples_per_second=1000.0, notes=(f"note{evil}",)),
    )
    print_answer(answer, folder / "best.json")
    shown = capsys.readouterr()
    for word in ("namea?[2J", "olda?[2J", "newa?[2J", "notea?[2J"):
        assert word in shown.out
    assert all(character.isprintable() or character == "\n" for character in shown.out + shown.err)
