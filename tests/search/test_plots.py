"""Optuna's plots of a search's study."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest

from autotune.errors import UsageError
from autotune.search.store.plots import render_plots


def make_study(path: Path, trials: int) -> Path:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(study_name="autotune", storage=f"sqlite:///{path}", direction="maximize")
    study._storage.set_study_system_attr(study._study_id, "study:metric_names", ["log of the memory saved"])
    study.optimize(lambda trial: 0.1 * trial.suggest_categorical("num_workers", [0, 2, 4]), n_trials=trials)
    return path


def test_all_are_on_one_page_which_asks_for_nothing(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    database = make_study(tmp_path / "study.db", 4)
    before = database.read_bytes()
    page = render_plots(database)
    for title in ("Optimization History Plot", "Hyperparameter Importances", "Parallel Coordinate Plot", "Slice Plot"):
        assert title in page
    assert "log of the memory saved" in page
    assert page.count('class="plotly-graph-div"') == 4
    assert '<script src="' not in page
    assert database.read_bytes() == before


@pytest.mark.parametrize(
    ("what", "said"),
    [("nothing measured", "has no completed trial"), ("damaged", "is no study"), ("missing", "is no study")],
)
def test_what_cannot_be_plotted_is_said_in_one_line(tmp_path: Path, what: str, said: str) -> None:
    pytest.importorskip("plotly")
    database = tmp_path / "study.db"
    if what == "nothing measured":
        make_study(database, 0)
    elif what == "damaged":
        database.write_bytes(b"SQLite format 3\x00" + b"\xff" * 4096)
    with pytest.raises(UsageError, match=said) as told:
        render_plots(database)
    assert "\n" not in str(told.value)


def test_without_plotly_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optuna.visualization.is_available", lambda: False)
    with pytest.raises(UsageError, match="plotly is not installed") as told:
        render_plots(make_study(tmp_path / "study.db", 1))
    assert "autotune-torch[plots]" in str(told.value.hint)
