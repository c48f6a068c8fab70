"""From launches to an explanation. Pure: nothing is run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from autotune.explain.changes import Change, list_changes, make_alone
from autotune.explain.readings import LEAST_PAIRS, Readings
from autotune.format import format_factor_down, format_share
from autotune.measure.confidence import finite_exp
from autotune.records.config import KnobValue, TrainConfig, changed_fields, get_knob
from autotune.records.explanation import ChangeEffect, Explanation, RefusedChanges, TriedValue
from autotune.records.facts import TargetFacts
from autotune.records.measurement import Interval
from autotune.records.objective import Objective
from autotune.records.probe import Issue
from autotune.records.profile import ParetoPoint, Profile
from autotune.records.trial import TrialStatus
from autotune.search.answer.pareto import find_peak
from autotune.search.log import list_changes as find_changes
from autotune.space import BATCH_KNOBS

PRECISE_ENOUGH = math.log(1.1)
"""Half of an interval, as a logarithm: a reading of the search that is known no better is measured (judgement)."""

_TELLING_WAIT = 0.05
_MOST_WAIT = 0.99

_FOLLOWERS = BATCH_KNOBS - {"micro_batch_size"}
"""Their values follow from another's."""


def choose_config(profile: Profile) -> TrainConfig | None:
    """Return what there is to explain: the answer, else the candidate that is not proven; None without either."""
    config = profile.config if profile.verdict == "improved" else profile.candidate_config
    return None if config is None or config == profile.baseline_config else config


def derive(profile: Profile, readings: Readings) -> Explanation:
    """Return what the launches of a search, its finals and its explanation say of its answer.

    Args:
        profile: the answer.
        readings: the launches; their config is the answer, or the baseline where there is nothing to explain.
    """
    report = readings.log.problem.report
    baseline, config = report.target.baseline, readings.config
    saves = profile.objective is Objective.MEMORY
    effects = [read_effect(one, readings) for one in list_changes(config, baseline, report.target.numerics)]
    return Explanation(
        label=profile.target.label,
        config=config,
        baseline_config=baseline,
        is_proven=profile.verdict == "improved",
        together=readings.together,
        changes=tuple(sorted(effects, key=_rank_by_memory if saves else lambda one: -_estimate(one))),
        tried=tuple(_list_tried(readings)),
        refused=tuple(_list_refused(readings)),
        measured=tuple(_list_measured(readings)),
        before=readings.describe_step(baseline),
        after=readings.describe_step(config) if config != baseline else None,
        bottleneck=report.verdict.sentence,
        ruled_out=report.ruled_out,
        troubles=(*report.troubles, *_list_waits(readings, report.target)),
        advice=report.advice,
        machine=f"{report.hardware.fingerprint}-{report.software.fingerprint}",
        rounds=tuple(tuple(one) for one in readings.rounds),
        spent_seconds=math.fsum(one.elapsed_seconds for one in readings.launched),
    )


def read_effect(change: Change, readings: Readings) -> ChangeEffect:
    """Return what a change is worth, by the best evidence there is of it."""
    baseline = readings.log.problem.baseline
    alone_config = make_alone(change, readings.config, baseline)
    alone, alone_launches = readings.read_alone(alone_config) if alone_config != baseline else (None, 0)
    own, other = readings.find_memory(readings.config), readings.find_memory(change.without)
    plain = ChangeEffect(
        names=change.names,
        without=change.without,
        numerics=change.numerics,
        memory_bytes=None if own is None or other is None else own - other,
        alone=alone,
        alone_launches=alone_launches,
        failure=readings.find_failure(change.without),
    )
    if change.without == baseline and readings.together is not None:
        return _rest_on_pairs(plain, "finals", readings.together, readings.finals_ratios)
    searched, launches = readings.compare_searched(change.without)
    ratios = readings.launched_ratios(change.without)
    if len(ratios) >= LEAST_PAIRS:
        return _rest_on_pairs(plain, "launches", readings.compare_launched(change.without), ratios)
    return plain if searched is None else plain.replace(source="search", worth=searched, launches=launches)


def is_settled(effect: ChangeEffect) -> bool:
    """Return whether a change need not be measured: it is known well enough, or the answer does not run without it."""
    if effect.failure or effect.source == "finals":
        return True
    worth = effect.worth
    return worth is not None and math.log(worth.high / worth.low) / 2 <= PRECISE_ENOUGH


def _rest_on_pairs(plain: ChangeEffect, source: str, worth: Interval | None, ratios: tuple[float, ...]) -> ChangeEffect:
    return plain.replace(source=source, worth=worth, log_ratios=ratios, launches=(len(ratios), len(ratios)))


def _estimate(effect: ChangeEffect) -> float:
    if effect.failure:
        return math.inf
    return 0.0 if effect.worth is None else effect.worth.estimate


def _rank_by_memory(effect: ChangeEffect) -> float:
    return -math.inf if effect.failure else effect.memory_bytes or 0.0


def _list_refused(readings: Readings) -> Iterator[RefusedChanges]:
    baseline = readings.log.problem.baseline
    for refused in readings.log.refused:
        scores = (
            one.speed
            for one in readings.log.ranking_of_all.measured
            if refused <= find_changes(one.config, baseline, changed_fields(one.config, baseline))
        )
        best = max(scores, default=None)
        yield RefusedChanges(changes=tuple(sorted(refused)), best=None if best is None else finite_exp(best))


def _list_measured(readings: Readings) -> Iterator[ParetoPoint]:
    for one in sorted(readings.log.ranking.measured, key=lambda one: -one.speed):
        yield ParetoPoint(config=one.config, speedup=finite_exp(one.speed), memory=find_peak(one, readings.finals))


def _list_waits(readings: Readings, facts: TargetFacts) -> Iterator[Issue]:
    """Yield what is left of a run when all is set, and is no setting: waiting for data, and what is no step."""
    step = readings.describe_step(readings.config)
    if step is not None and step.data_wait_fraction > _TELLING_WAIT:
        most = format_factor_down(1 / (1 - min(step.data_wait_fraction, _MOST_WAIT)))
        yield Issue(
            name="data-wait",
            sentence=f"{format_share(step.data_wait_fraction)} of a step is still waiting for data: without it a step "
            f"would be {most} as fast",
            remedy="make a sample cheaper: prepare it once instead of every time, keep it on a faster disk",
        )
    if facts.aside_fraction > _TELLING_WAIT:
        yield Issue(
            name="aside",
            sentence=f"{format_share(facts.aside_fraction)} of your run is validation and the like, which faster "
            "steps do not shorten",
            remedy="validate less often, or on fewer samples",
        )


def _list_tried(readings: Readings) -> Iterator[TriedValue]:
    """Yield every value that was launched and is not explained, the knobs in their order."""
    log, config = readings.log, readings.config
    baseline = log.problem.baseline
    having: dict[tuple[str, KnobValue | None], list[TrainConfig]] = {}
    for judged in log.judged:
        for name in changed_fields(judged.config, baseline):
            if name not in _FOLLOWERS and get_knob(judged.config, name) != get_knob(config, name):
                having.setdefault((name, get_knob(judged.config, name)), []).append(judged.config)
    for (name, value), configs in having.items():
        yield _read_value(readings, name, value, configs)


def _read_value(readings: Readings, name: str, value: KnobValue | None, configs: list[TrainConfig]) -> TriedValue:
    baseline = readings.log.problem.baseline
    distinct = {one.key: one for one in configs}
    scores = {key: readings.read_alone(one)[0] for key, one in distinct.items()}
    alone = next((one for one in distinct.values() if _is_alone(one, name, baseline)), None)
    saves = readings.log.problem.objective is Objective.MEMORY
    peaks = [readings.find_memory(one) for one in distinct.values()] if saves else []
    ended = (one.score.status for one in readings.log.judged if one.key in distinct)
    failed = Counter(status.value for status in ended if status is not TrialStatus.COMPLETED)
    return TriedValue(
        knob=name,
        value=value,
        launches=len(configs),
        alone=None if alone is None else scores[alone.key],
        best=max((score for score in scores.values() if score is not None), default=None),
        least_bytes=min((peak for peak in peaks if peak is not None), default=None),
        failed=dict(failed),
    )


def _is_alone(config: TrainConfig, name: str, baseline: TrainConfig) -> bool:
    changed = {one for one in changed_fields(config, baseline) if one not in _FOLLOWERS}
    return changed == {name}
