"""What a study models, by the objective of its search: speed-ups, or the memory saved and the speed that is kept."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.records.objective import Objective
from autotune.search.explore.additive import Prior
from autotune.search.explore.prior import make_saving_prior
from autotune.search.explore.study import SpeedFloor
from autotune.search.launch.forecast import Forecast
from autotune.search.log import SearchLog


@dataclass(frozen=True)
class Aim:
    """What a study maximises.

    Attributes:
        prior: what changes usually bring of it.
        floor: what it holds the speed to, where that is not what it maximises.
    """

    prior: Prior
    floor: SpeedFloor | None = None


def find_aim(log: SearchLog, speed: Prior) -> Aim:
    """Return what the study of a search maximises.

    Args:
        log: of the search.
        speed: what changes usually bring in speed.
    """
    problem = log.problem
    if problem.objective is not Objective.MEMORY:
        return Aim(speed)
    forecast = Forecast(problem.report, problem.limits)
    on_host = problem.report.measurement.peak_memory.device_bytes is None
    prior = make_saving_prior(problem.space, forecast.predict_peak_bytes, on_host=on_host)
    floor = SpeedFloor(problem.policy.least_speed, speed, lambda judged: log.ranking.speed_of(judged))
    return Aim(prior, floor)
