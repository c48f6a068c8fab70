"""Optuna's own plots of a search, on one page to be explored: it holds plotly's script, some megabytes."""

from __future__ import annotations

import sqlite3
import warnings
from pathlib import Path

import optuna
import optuna.visualization as visualization
from optuna.storages import RDBStorage
from optuna.study import Study
from optuna.trial import TrialState

from autotune.errors import UsageError

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>autotune: plots of {name}</title></head><body>
{figures}
</body></html>
"""


def render_plots(database: Path) -> str:
    """Return an HTML page with a study as Optuna plots it: history, importances, parallel coordinates and slices.

    Args:
        database: the study's SQLite file.

    Raises:
        UsageError: plotly is not installed, or the study cannot be read or has no completed trial.
    """
    if not visualization.is_available():
        raise UsageError("plotly is not installed", hint='pip install "autotune-torch[plots]"')
    study = _open_study(database)
    if not study.get_trials(deepcopy=False, states=[TrialState.COMPLETE]):
        raise UsageError(f"{database} has no completed trial to be plotted", hint="autotune report says what happened")
    measured = (study.metric_names or ["value"])[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few trials: the page shows how many there are
        drawn = [
            visualization.plot_optimization_history(study, target_name=measured),
            visualization.plot_param_importances(study, target_name=measured),
            visualization.plot_parallel_coordinate(study, target_name=measured),
            visualization.plot_slice(study, target_name=measured),
        ]
    figures = (figure.to_html(full_html=False, include_plotlyjs=not at) for at, figure in enumerate(drawn))
    return _PAGE.format(name=database.parent.name, figures="\n".join(figures))


def _open_study(database: Path) -> Study:
    """Return the study in a file, which is not written to."""

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True, check_same_thread=False)

    try:
        storage = RDBStorage("sqlite://", engine_kwargs={"creator": connect}, skip_table_creation=True)
        return optuna.load_study(study_name=None, storage=storage)
    except Exception as error:  # whatever SQLite, SQLAlchemy and Optuna say of a damaged file
        raise UsageError(
            f"{database} is no study that can be read: {error}", hint="resume the search: it is made anew"
        ) from error
