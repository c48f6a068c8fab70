"""The sampler in studies of anybody's: what it proposes, what it leaves out, that it finds what there is to find."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from autotune.search.explore.additive import Effect, Prior
from autotune.search.explore.sampler import TAKEN_BACK, LogAdditiveSampler, enumerate_rows, list_values

SPACE = {
    "allocator": CategoricalDistribution(("default", "tuned")),
    "layout": CategoricalDistribution(("plain", "last")),
    "precision": CategoricalDistribution(("fp32", "bf16")),
    "workers": IntDistribution(0, 3),
}
BASELINE = {"allocator": "default", "layout": "plain", "precision": "fp32", "workers": 0}
TRUE = {"tuned": 0.2, "last": 0.15, "bf16": -0.3, 1: 0.1, 2: 0.25, 3: 0.05}
PRIOR = Prior({("allocator", None): Effect(0.1, 0.2), ("precision", "bf16"): Effect(-0.1, 0.2)}, {})


@pytest.fixture(autouse=True)
def quiet():
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def rate(params: dict[str, Any]) -> float:
    return math.fsum(TRUE.get(value, 0.0) for value in params.values())


def make_study(is_open: Callable[[dict[str, Any]], bool] = lambda _params: True, **options: Any) -> optuna.Study:
    sampler = LogAdditiveSampler(SPACE, BASELINE, prior=PRIOR, **options)
    sampler.is_open = is_open
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.enqueue_trial(BASELINE)
    return study


def run(study: optuna.Study, count: int) -> list[dict[str, Any]]:
    for _ in range(count):
        trial = study.ask(SPACE)
        study.tell(trial, rate(trial.params))
    return [trial.params for trial in study.trials]


@pytest.mark.parametrize("seed", range(5))
def test_it_finds_the_best_of_32_in_ten(seed):
    assert {"allocator": "tuned", "layout": "last", "precision": "fp32", "workers": 2} in run(make_study(seed=seed), 10)


def test_nothing_is_proposed_twice_while_there_is_something_new():
    tried = [tuple(params.items()) for params in run(make_study(), 32)]
    assert len(set(tried)) == 32


def test_what_is_closed_is_not_proposed():
    tried = run(make_study(is_open=lambda params: params["precision"] == "fp32"), 16)
    assert {params["precision"] for params in tried} == {"fp32"}
    assert len({tuple(params.items()) for params in tried}) == 16


def test_values_that_may_not_come_together_are_left_out_without_being_asked_about():
    asked: list[dict[str, Any]] = []
    study = make_study(lambda params: not asked.append(params))
    study.sampler.closed_values = [{"precision": "bf16"}, {"allocator": "tuned", "workers": 2}, {"workers": 9}]
    tried = run(study, 14)[1:]
    assert len({tuple(params.items()) for params in tried}) == 13
    for params in (*tried, *asked):
        assert params["precision"] == "fp32"
        assert (params["allocator"], params["workers"]) != ("tuned", 2)
    study.sampler.closed_values = []
    assert "bf16" in {params["precision"] for params in run(study, 8)[14:]}


def test_thousands_of_values_that_may_not_come_together_take_no_time_each():
    values = {"layout": CategoricalDistribution(("plain", "last")), "own": CategoricalDistribution(tuple(range(2000)))}
    sampler = LogAdditiveSampler(values, {"layout": "plain", "own": 0}, prior=Prior({}, {}))
    study = optuna.create_study(direction="maximize", sampler=sampler)
    sampler.closed_values = [{"layout": "last", "own": value} for value in range(1, 2000)]
    asked: list[dict[str, Any]] = []
    sampler.is_open = lambda params: not asked.append(params) and params["layout"] == "last"
    assert study.ask(values).params == {"layout": "last", "own": 0}
    assert all(params["layout"] == "plain" or params["own"] == 0 for params in asked)


def test_what_a_change_brings_is_doubted_until_it_was_seen():
    study = make_study(seed=0)
    all_three = BASELINE | {"allocator": "tuned", "precision": "bf16", "workers": 1}
    assert len(study.sampler.list_simpler(study, all_three)) == 3
    run(study, 24)
    harmful = all_three | {"precision": "fp32"}
    assert study.sampler.list_simpler(study, all_three) == [harmful]  # the others bring 20 % and 10 % here
    assert study.sampler.list_simpler(study, BASELINE) == []


def test_what_costs_more_comes_later():
    def place(price: float) -> int:
        study = make_study(price=lambda params: price if params["allocator"] == "tuned" else 1.0)
        return next(place for place, params in enumerate(run(study, 32)) if params["allocator"] == "tuned")

    assert place(1.0) < place(50.0)


@pytest.mark.parametrize(
    ("price", "dear_values", "is_dear"),
    [
        (100.0, [], True),  # more rows than are looked at have it
        (100.0, [({"dear": 1}, 1.0)], False),
        (2.0, [({"dear": 1}, 1.0)], True),
        (2.0, [({"dear": 1}, 8.0)], False),
    ],
)
def test_the_best_without_what_is_dear_is_weighed_against_the_best(price, dear_values, is_dear):
    space = {name: IntDistribution(0, most) for name, most in (("dear", 1), ("cheap", 1), ("other", 30))}
    effects = {("dear", 1): Effect(0.5, 0.01), ("cheap", 1): Effect(0.1, 0.01), ("other", None): Effect(0.0, 0.01)}
    baseline = dict.fromkeys(space, 0)
    sampler = LogAdditiveSampler(
        space, baseline, prior=Prior(effects, {}), price=lambda params: price if params["dear"] else 1.0
    )
    sampler.dear_values = dear_values
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.enqueue_trial(baseline)
    study.tell(study.ask(space), 0.0)
    assert study.ask(space).params["dear"] == is_dear


@pytest.mark.parametrize(("values", "other"), [("closed_values", 0), ("lost_values", 1)])
def test_what_is_lost_is_closed_and_no_bar_for_others(values, other):
    # Where nothing can reach the best, what is cheap is proposed; without this bar, what brings the most for its price.
    space = {name: IntDistribution(0, 1) for name in ("cheap", "lost", "other")}
    effects = {
        ("cheap", None): Effect(0.1, 0.01),
        ("lost", None): Effect(1.0, 0.01),
        ("other", None): Effect(0.3, 0.01),
    }
    baseline = dict.fromkeys(space, 0)
    sampler = LogAdditiveSampler(
        space, baseline, prior=Prior(effects, {}), price=lambda params: 1.8 if params["other"] else 1.0
    )
    setattr(sampler, values, [{"lost": 1}])
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for params, value in ((baseline, 0.0), (baseline | {"lost": 1}, 1.0)):
        study.enqueue_trial(params)
        study.tell(study.ask(space), value)
    proposed = study.ask(space).params
    assert proposed["lost"] == 0
    assert proposed["other"] == other


def test_the_same_seed_and_history_propose_the_same():
    assert run(make_study(seed=3), 12) == run(make_study(seed=3), 12)
    assert run(make_study(seed=3), 12) != run(make_study(seed=4), 12)


def test_trials_that_run_are_not_proposed_again():
    study = make_study()
    asked = [tuple(study.ask(SPACE).params.items()) for _ in range(8)]
    assert len(set(asked)) == 8


def test_what_was_taken_back_may_be_proposed_again_and_what_failed_or_was_pruned_may_not():
    study = make_study()
    run(study, 2)
    taken_back, failed, pruned = study.ask(SPACE), study.ask(SPACE), study.ask(SPACE)
    taken_back.set_user_attr(TAKEN_BACK, True)
    study.tell(taken_back, state=TrialState.FAIL)
    study.tell(failed, state=TrialState.FAIL)
    study.tell(pruned, state=TrialState.PRUNED)
    later = run(study, 28)[5:]
    assert taken_back.params in later
    assert failed.params not in later
    assert pruned.params not in later


def test_an_objective_that_raises_is_asked_of_something_else():
    def objective(trial: optuna.Trial) -> float:
        params = {name: trial._suggest(name, one) for name, one in SPACE.items()}
        if params["precision"] == "bf16":
            raise RuntimeError
        return rate(params)

    study = make_study()
    study.optimize(objective, n_trials=32, catch=(RuntimeError,))
    assert len({tuple(trial.params.items()) for trial in study.trials}) == 32


def test_several_workers_of_one_study_launch_nothing_twice():
    def objective(trial: optuna.Trial) -> float:
        return rate({name: trial._suggest(name, one) for name, one in SPACE.items()})

    study = make_study()
    study.optimize(objective, n_trials=32, n_jobs=4)
    assert len({tuple(trial.params.items()) for trial in study.trials}) == 32


def test_a_trial_that_was_seen_before_it_had_its_params_is_learnt_from():
    study = make_study()
    run(study, 1)
    late = study.ask()  # its params come when it suggests them
    study.ask(SPACE)
    params = {name: late._suggest(name, one) for name, one in SPACE.items()}
    study.tell(late, rate(params))
    assert isinstance(study.sampler, LogAdditiveSampler)
    assert late.number in study.sampler.list_estimates(study)


def test_where_the_model_does_not_fit_every_second_turn_is_tpes(monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr("autotune.search.explore.sampler.LogAdditiveModel.misfit", 3.0)
    plain = optuna.samplers.TPESampler.sample_relative

    def note(self: Any, study: optuna.Study, trial: Any, space: Any) -> Any:
        asked.append(trial.number)
        return plain(self, study, trial, space)

    monkeypatch.setattr(optuna.samplers.TPESampler, "sample_relative", note)
    run(make_study(), 12)
    assert asked == [2, 4, 6, 8, 10]


def test_where_nothing_is_open_the_study_is_told():
    study = make_study()
    run(study, 33)
    assert isinstance(study.sampler, LogAdditiveSampler)
    assert study.sampler.exhausted


def test_a_space_that_is_too_large_varies_the_least_promising_knobs_alone():
    values = {f"k{number}": tuple(range(8)) for number in range(8)}
    rows = enumerate_rows(values, dict.fromkeys(values, 0), {name: float(name[1:]) for name in values})
    assert len(rows) == 8**4 + 4 * 7
    assert {int((row[:4] != 0).sum()) for row in rows} == {0, 1}


def test_a_distribution_without_end_is_refused():
    assert list_values(IntDistribution(2, 8, step=3)) == [2, 5, 8]
    with pytest.raises(ValueError, match="cannot be enumerated"):
        list_values(FloatDistribution(0, 1))


def test_estimates_are_of_the_trials_that_were_timed_by_their_numbers():
    space = {"a": CategoricalDistribution((0, 1)), "b": CategoricalDistribution((0, 1))}
    sampler = LogAdditiveSampler(space, {"a": 0, "b": 0}, prior=Prior({}, {}))
    study = optuna.create_study(direction="maximize", sampler=sampler)
    told = ({"a": 1, "b": 0}, 0.5), ({"a": 1, "b": 1}, None), ({"a": 0, "b": 1}, -0.2), ({"a": 1, "b": 0}, 0.3)
    for params, value in told:
        study.enqueue_trial(params)
        state = TrialState.PRUNED if value is None else TrialState.COMPLETE
        study.tell(study.ask(space), value, state=state)
    found = sampler.list_estimates(study)
    assert found.keys() == {0, 2, 3}
    assert found[0] == found[3] == pytest.approx(0.4, abs=0.1)
    assert found[2] < 0.0
