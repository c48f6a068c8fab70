"""Which values are given up after launches failed, and which are tried alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from record_factory import make_result, make_spec
from simulated import BASELINE

from autotune.records import TrainConfig, TrialResult, TrialStatus
from autotune.search.launch.suspects import Suspects, describe_guilty

BF16, WORKERS, MALLOC = {"precision": "bf16"}, {"num_workers": 2}, {"host_allocator": "jemalloc"}
FAILED = [TrialStatus.TIMED_OUT, TrialStatus.TOO_SLOW, TrialStatus.CRASHED, TrialStatus.UNSUPPORTED]


def config(*changes: dict[str, Any]) -> TrainConfig:
    return BASELINE.replace(**{name: value for change in changes for name, value in change.items()})


def launch(status: TrialStatus, *changes: dict[str, Any]) -> TrialResult:
    return make_result(make_spec(config(*changes)), status=status)


def blocks(results: list[TrialResult], *changes: dict[str, Any]) -> bool:
    return Suspects(results, BASELINE).is_blocked(config(*changes))


@pytest.mark.parametrize("status", FAILED)
@pytest.mark.fault("18", injected="a value whose launches fail", outcome="never launched again, with anything")
def test_a_value_that_fails_alone_is_refused_with_anything(status):
    results = [launch(status, BF16)]
    assert blocks(results, BF16)
    assert blocks(results, BF16, WORKERS)
    assert not blocks(results, WORKERS)
    assert list(Suspects(results, BASELINE).guilty) == ["precision=bf16"]


def test_several_that_fail_together_are_tried_one_at_a_time():
    results = [launch(TrialStatus.TIMED_OUT, BF16, WORKERS, MALLOC)]
    assert blocks(results, BF16, WORKERS)
    assert not blocks(results, BF16)
    assert not blocks(results, WORKERS, {"memory_format": "channels_last"})
    assert Suspects(results, BASELINE).guilty == {}


def test_what_launches_with_the_same_error_share_is_suspected():
    def crash(error: str, *changes: dict[str, Any]) -> TrialResult:
        return launch(TrialStatus.CRASHED, *changes).replace(error=error)

    results = [crash("boom", BF16, WORKERS), crash("boom", BF16, MALLOC)]
    assert list(Suspects(results, BASELINE).guilty) == ["precision=bf16"]
    assert not blocks(results, WORKERS, MALLOC)
    others = [crash("boom", BF16, WORKERS), crash("bang", BF16, MALLOC)]
    assert Suspects(others, BASELINE).guilty == {}
    untold = [one.replace(cause="no-result") for one in results]
    assert Suspects(untold, BASELINE).guilty == {}
    of_the_machine = [crash("OSError: No space left on device", BF16, WORKERS), crash("HTTPError: 503", BF16)]
    assert not Suspects([one.replace(cause="user-error") for one in of_the_machine], BASELINE).is_blocked(config(BF16))
    of_workers = crash("ConnectionResetError: [Errno 104] Connection reset by peer", WORKERS).replace(
        cause="user-error"
    )
    assert Suspects([of_workers], BASELINE).is_blocked(config(WORKERS))
    apart = [crash("boom", BF16), crash("boom", WORKERS)]
    assert sorted(Suspects(apart, BASELINE).guilty) == ["num_workers=2", "precision=bf16"]


@pytest.mark.parametrize(
    ("error", "more", "guilty"),
    [
        ("TypeError: Got unsupported ScalarType BFloat16", MALLOC, ["precision=bf16"]),
        ("RuntimeError: \"cdist\" not implemented for 'BFloat16'", MALLOC, ["precision=bf16"]),
        ("InductorError: cannot lower bfloat16", {"compile_mode": "default"}, []),
        ("ValueError: something else", MALLOC, []),
    ],
)
def test_an_error_that_names_a_type_says_which_value_it_was(error: str, more: dict[str, Any], guilty: list[str]):
    results = [launch(TrialStatus.CRASHED, BF16, more).replace(error=error)]
    assert list(Suspects(results, BASELINE).guilty) == guilty


def test_the_last_one_that_has_not_worked_is_guilty():
    results = [launch(TrialStatus.TIMED_OUT, BF16, WORKERS), launch(TrialStatus.COMPLETED, WORKERS)]
    assert blocks(results, BF16)
    assert not blocks(results, WORKERS, MALLOC)
    # Also where the launch that worked came first.
    assert blocks(results[::-1], BF16)


def test_what_works_alone_and_fails_together_is_refused_together_only():
    results = [launch(TrialStatus.COMPLETED, BF16), launch(TrialStatus.COMPLETED, WORKERS)]
    results.append(launch(TrialStatus.CRASHED, BF16, WORKERS))
    assert blocks(results, BF16, WORKERS, MALLOC)
    assert not blocks(results, BF16, MALLOC)


def test_what_ran_out_of_memory_may_fit_with_what_saves_memory():
    results = [launch(TrialStatus.OUT_OF_MEMORY, {"micro_batch_size": 64})]
    assert blocks(results, {"micro_batch_size": 64}, MALLOC)
    assert not blocks(results, {"micro_batch_size": 64}, {"activation_checkpointing": "full"})


CHOICES: dict[str, tuple[Any, ...]] = {
    "precision": ("fp32", "bf16"),
    "num_workers": (0, 2, 4),
    "host_allocator": ("default", "jemalloc"),
    "activation_checkpointing": ("off", "full"),
}


@pytest.mark.parametrize("worked", [[], [BF16], [WORKERS], [BF16, WORKERS]])
@pytest.mark.parametrize("failed", [[BF16], [BF16, WORKERS], [BF16, WORKERS, MALLOC]])
@pytest.mark.parametrize("status", [TrialStatus.CRASHED, TrialStatus.OUT_OF_MEMORY])
def test_the_combinations_that_are_listed_are_those_that_are_blocked(status, failed, worked):
    results = [*(launch(TrialStatus.COMPLETED, one) for one in worked), launch(status, *failed)]
    assert_lists_what_it_blocks(Suspects(results, BASELINE))


def assert_lists_what_it_blocks(suspects: Suspects) -> None:
    combinations = suspects.list_blocked(CHOICES)
    for one in combinations:
        assert len({text.partition("=")[0] for text in one}) == len(one)  # else it is a combination of nothing
    for values in itertools.product(*CHOICES.values()):
        changes = dict(zip(CHOICES, values, strict=True))
        texts = {f"{name}={value}" for name, value in changes.items()}
        assert any(one <= texts for one in combinations) == suspects.is_blocked(config(changes)), changes


def test_two_suspect_values_of_one_knob_do_not_block_one_another():
    one, other = {"num_workers": 2}, {"num_workers": 4}
    suspects = Suspects([launch(TrialStatus.CRASHED, one, BF16), launch(TrialStatus.CRASHED, other, MALLOC)], BASELINE)
    assert not any(suspects.is_blocked(config(alone)) for alone in (one, other))
    assert_lists_what_it_blocks(suspects)


def test_what_drifts_is_held_against_what_is_not_exact():
    results = [launch(TrialStatus.DRIFTED, BF16, WORKERS)]
    assert blocks(results, BF16, MALLOC)
    assert not blocks(results, WORKERS, MALLOC)
    assert not blocks([launch(TrialStatus.DRIFTED, WORKERS)], WORKERS)  # then it is no value's fault


@pytest.mark.parametrize("status", [TrialStatus.COMPLETED, TrialStatus.INTERRUPTED])
def test_nothing_else_is_held_against_a_value(status):
    assert not blocks([launch(status, BF16)], BF16, WORKERS)


def test_how_a_batch_is_split_is_one_change():
    split = {"micro_batch_size": 16, "gradient_accumulation_steps": 2}
    assert blocks([launch(TrialStatus.CRASHED, split)], split, WORKERS)


@pytest.mark.parametrize(("status", "is_blocked"), [(TrialStatus.TIMED_OUT, True), (TrialStatus.CRASHED, False)])
def test_where_one_number_of_workers_hangs_every_number_does(status, is_blocked):
    results = [launch(status, WORKERS)]
    assert blocks(results, {"num_workers": 1}) == is_blocked
    assert not blocks([*results, launch(TrialStatus.COMPLETED, {"num_workers": 1})], {"num_workers": 1})


@pytest.mark.parametrize(("first", "is_blocked"), [("default", True), ("max-autotune-no-cudagraphs", False)])
def test_where_plain_compiling_crashes_every_compiling_does(first, is_blocked):
    other = {"compile_mode": "reduce-overhead"}
    results = [launch(TrialStatus.CRASHED, {"compile_mode": first})]
    assert blocks(results, other) == is_blocked
    assert not blocks([launch(TrialStatus.DRIFTED, {"compile_mode": first})], other)
    assert not blocks([*results, launch(TrialStatus.COMPLETED, other)], other)


def test_what_was_given_up_is_told():
    told = describe_guilty(Suspects([launch(TrialStatus.TOO_SLOW, BF16)], BASELINE))
    assert told == ["precision=bf16 was given up after one launch: too slow"]


def test_where_the_users_own_settings_run_out_of_time_no_change_is_blamed_for_it():
    results = [launch(TrialStatus.TIMED_OUT), launch(TrialStatus.TIMED_OUT, MALLOC), launch(TrialStatus.CRASHED, BF16)]
    assert list(Suspects(results, BASELINE).guilty) == ["precision=bf16"]
    assert not blocks(results, MALLOC)
    # Once they have come to their end, time was enough.
    assert blocks([*results, launch(TrialStatus.COMPLETED)], MALLOC)
