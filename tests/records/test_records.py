from __future__ import annotations

import ast
import datetime
import enum
import functools
import importlib
import inspect
import json
import math
import pkgutil
import re
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from annotated_types import Ge, Gt, Le, Lt, MinLen
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from record_factory import (
    make_block,
    make_check,
    make_hardware,
    make_interval,
    make_measurement,
    make_profile,
    make_software,
)

import autotune.records
from autotune.errors import ProfileError, UsageError
from autotune.records import (
    Interval,
    Measurement,
    Profile,
    ProfileTarget,
    Record,
    TrainConfig,
    changed_fields,
    get_knob,
    parse_record,
    with_knobs,
)
from autotune.records.given import GivenError, GivenRecord
from autotune.records.measurement import Interference
from autotune.records.profile import MAX_PROFILE_BYTES
from autotune.records.quality import DriftLimits, Margin
from autotune.records.reading import MOST_COUNT
from autotune.records.search import PlannedRun, Preset


def _record_classes() -> list[type[Record]]:
    modules = [
        importlib.import_module(f"autotune.records.{found.name}")
        for found in pkgutil.iter_modules(autotune.records.__path__)
    ]
    classes = {kind for module in modules for kind in vars(module).values() if inspect.isclass(kind)}
    return sorted(
        {kind for kind in classes if issubclass(kind, Record)} - {Record, GivenRecord}, key=lambda kind: kind.__name__
    )


RECORDS = _record_classes()
PRINTABLE = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=20)
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "precision": st.sampled_from(["fp32", "bf16"]),
        "num_workers": st.integers(0, 8),
        "user_knobs.it": PRINTABLE,
    },
)


@functools.cache
def records(kind: type[Record], most: int = 3) -> st.SearchStrategy[Any]:
    """Any valid record of a kind, from its fields' types and constraints.

    Args:
        kind: of the record.
        most: items of a list in it; records in records have one each, or a large one takes seconds to draw.
    """
    fields = {name: values(field.annotation, field.metadata, most) for name, field in kind.model_fields.items()}
    if kind is Preset:
        fields["settings"] = SETTINGS  # knobs and values that there are
    if kind is Profile:
        fields["speedup"] = fields["memory_ratio"] = records(Interval)  # what is claimed must have one
        fields["date"] = st.dates(datetime.date(1000, 1, 1)).map(datetime.date.isoformat)
        fields["baseline_config"] = st.just(TrainConfig(user_knobs={"own": 1}))  # and be another config
    return st.fixed_dictionaries(fields).map(lambda drawn: kind(**drawn))


def values(annotation: Any, constraints: list[Any], most: int) -> st.SearchStrategy[Any]:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return values(inner[0], [part for field in inner[1:] for part in getattr(field, "metadata", [field])], most)
    if origin is Literal:
        return st.sampled_from(inner)
    if origin in (Union, types.UnionType):
        return st.one_of([values(option, constraints if option is not type(None) else [], most) for option in inner])
    if origin is tuple and ... not in inner:
        return st.tuples(*(values(one, [], most) for one in inner))
    if origin is tuple:
        fewest = next((limit.min_length for limit in constraints if isinstance(limit, MinLen)), 0)
        return st.lists(values(inner[0], [], most), min_size=fewest, max_size=max(fewest, most)).map(tuple)
    if origin is dict:
        return st.dictionaries(values(inner[0], [], most), values(inner[1], [], most), max_size=most)
    if issubclass(annotation, Record):
        return records(annotation, 1)
    return plain_values(annotation, constraints)


def plain_values(kind: type, constraints: list[Any]) -> st.SearchStrategy[Any]:
    if kind is type(None):
        return st.none()
    if issubclass(kind, enum.Enum):
        return st.sampled_from(list(kind))
    if kind is bool:
        return st.booleans()
    if kind is str:
        is_printable = any(getattr(part, "pattern", None) for part in constraints)
        fewest = next((limit.min_length for limit in constraints if isinstance(limit, MinLen)), 0)
        return PRINTABLE if is_printable else st.text(min_size=fewest, max_size=20)
    if kind is int:
        most = {"min_value": -MOST_COUNT, "max_value": MOST_COUNT}  # what a file may hold
        return st.integers(**(most | bounds(constraints, step=1)))
    assert kind is float, f"teach this test how to draw a {kind}"
    limits = bounds(constraints, step=0)
    return st.floats(
        **limits,
        allow_nan=False,
        allow_infinity=False,
        exclude_min=any(isinstance(limit, Gt) for limit in constraints),
        exclude_max=any(isinstance(limit, Lt) for limit in constraints),
    )


def bounds(constraints: list[Any], *, step: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for limit in constraints:
        match limit:
            case Ge():
                found["min_value"] = limit.ge
            case Gt():
                found["min_value"] = limit.gt + step
            case Le():
                found["max_value"] = limit.le
            case Lt():
                found["max_value"] = limit.lt - step
    return found


def test_every_record_class_is_found() -> None:
    assert len(RECORDS) >= 25
    public = {kind for kind in vars(autotune.records).values() if inspect.isclass(kind) and issubclass(kind, Record)}
    assert public - {Record} <= set(RECORDS)


def list_unexplained(kind: type[Record]) -> list[str]:
    """Return the fields of a record that are not followed by a sentence of what they mean."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    fields = [place for place, line in enumerate(definition.body) if isinstance(line, ast.AnnAssign)]
    assert len(fields) == len(inspect.get_annotations(kind)), kind
    found = []
    for place in fields:
        match definition.body[place + 1 : place + 2]:
            case [ast.Expr(value=ast.Constant(value=str(meaning)))] if meaning.endswith("."):
                continue
        found.append(f"{kind.__name__}: {ast.unparse(definition.body[place])}")
    return found


def test_every_field_says_what_it_means() -> None:
    assert [kind.__name__ for kind in RECORDS if not kind.__doc__] == []
    assert [text for kind in RECORDS for text in list_unexplained(kind)] == []


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_record_survives_json_both_ways(kind: type[Record], data: st.DataObject) -> None:
    record = data.draw(records(kind))
    text = record.to_json()
    back = parse_record(text, kind, name="any.json")
    assert back == record
    assert back.to_json() == text
    assert kind.model_validate(record.model_dump()) == record
    assert record.replace() == record
    json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} was written"))


def test_every_record_is_as_strict_as_the_others() -> None:
    assert [kind.__name__ for kind in RECORDS if kind.model_config != Record.model_config] == []
    assert (Record.model_config["frozen"], Record.model_config["extra"]) == (True, "forbid")


@pytest.mark.parametrize("kind", [TrainConfig, Profile, Margin], ids=lambda kind: kind.__name__)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_any_record_refuses_changes_and_unknown_fields(kind: type[Record], data: st.DataObject) -> None:
    record = data.draw(records(kind))
    name = next(iter(kind.model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(record, name, getattr(record, name))
    with pytest.raises(ValidationError, match="frozen"):
        delattr(record, name)
    with pytest.raises(ValueError, match="unheard_of"):
        record.replace(unheard_of=1)
    with pytest.raises(ProfileError, match="unheard_of"):
        parse_record(json.dumps({**json.loads(record.to_json()), "unheard_of": 1}), kind, name="any.json")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_record_holds_what_json_cannot(value: float) -> None:
    for kind, change in ((Interval, {"low": value}), (TrainConfig, {"user_knobs": {"lr": value}})):
        with pytest.raises(ValidationError, match="finite"):
            kind.model_validate({"estimate": 1.0, "low": 1.0, "high": 1.0, **change})


def test_defaults_are_not_shared() -> None:
    first, second = TrainConfig(), TrainConfig()
    assert first.user_knobs is not second.user_knobs
    assert Profile.model_fields["evidence"].default == autotune.records.Evidence()


configs = records(TrainConfig)
knob_names = st.sampled_from(
    [*(name for name in TrainConfig.model_fields if name != "user_knobs"), "user_knobs.lr", "user_knobs.a.b"]
)


@given(configs, configs)
def test_changed_fields_are_exactly_those_that_differ(config: TrainConfig, reference: TrainConfig) -> None:
    changed = changed_fields(config, reference)
    assert len(set(changed)) == len(changed)
    assert set(changed) == set(changed_fields(reference, config))
    rebuilt = reference
    for name in changed:
        assert get_knob(config, name) != get_knob(reference, name)
        rebuilt = with_knobs(rebuilt, {name: get_knob(config, name)})
    assert rebuilt == config
    assert changed_fields(config, config) == ()


@given(configs, configs, knob_names)
def test_one_knob_is_set_and_every_other_kept(config: TrainConfig, other: TrainConfig, name: str) -> None:
    value = get_knob(other, name)
    changed = with_knobs(config, {name: value})
    assert get_knob(changed, name) == value
    assert set(changed_fields(changed, config)) <= {name}
    assert with_knobs(config, {name: get_knob(config, name)}) == config


@given(configs, st.text(min_size=1, max_size=8), st.none() | st.integers() | st.text(max_size=5) | st.booleans())
def test_a_knob_of_the_workload_is_set_and_removed(config: TrainConfig, own: str, value: Any) -> None:
    name = f"user_knobs.{own}"
    changed = with_knobs(config, {name: value})
    assert get_knob(changed, name) == value
    assert (own in changed.user_knobs) is (value is not None)
    assert own not in with_knobs(changed, {name: None}).user_knobs


@pytest.mark.parametrize(
    ("name", "value"),
    [("micro_batch_size", 0), ("micro_batch_size", "8"), ("precision", "fp8"), ("num_workers", True), ("nope", 1)],
)
def test_a_bad_knob_is_refused(name: str, value: Any) -> None:
    with pytest.raises(GivenError, match=name):
        with_knobs(TrainConfig(), {name: value})


@pytest.mark.parametrize(
    ("build", "message", "hint"),
    [
        (lambda: Margin(amount="0.5%"), "Margin: amount is '0.5%', of type str", "it should be a valid number"),  # type: ignore[arg-type]
        (lambda: Margin("0.5%"), "Margin takes its fields by name", "write Margin(amount=..., unit=...)"),  # type: ignore[call-arg]
        (lambda: Margin(), "Margin: 'amount' is missing", "write Margin(amount=..., unit=...)"),  # type: ignore[call-arg]
        (lambda: DriftLimits(loss=0.005), "DriftLimits: loss is 0.005, of type float", "it should be a Margin"),  # type: ignore[arg-type]
        (
            lambda: TrainConfig(num_worker=2),  # type: ignore[call-arg]
            "TrainConfig: unknown key 'num_worker', did you mean 'num_workers'?",
            "help(TrainConfig) lists its fields",
        ),
        (
            lambda: TrainConfig().replace(precision="bf8"),
            "TrainConfig: precision is 'bf8', of type str",
            "it should be 'fp32', 'bf16' or 'fp16'",
        ),
        (
            lambda: PlannedRun(amount=30, unit="epoch"),  # type: ignore[arg-type]
            "PlannedRun: unit is 'epoch', of type str",
            "it should be 'seconds', 'epochs' or 'samples'",
        ),
        (
            lambda: Preset(name="mine", description="", settings={"num_worker": 2}),
            "Preset: settings: unknown key 'num_worker', did you mean 'num_workers'?",
            "write Preset(name=..., description=..., settings=...)",
        ),
    ],
)
def test_what_a_user_builds_wrongly_is_told_in_a_line(build: Callable[[], Any], message: str, hint: str) -> None:
    with pytest.raises(GivenError) as caught:
        build()
    assert isinstance(caught.value, UsageError)
    assert (caught.value.message, caught.value.hint) == (message, hint)
    assert caught.value.__notes__ == [hint]
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@given(configs)
def test_the_effective_batch_is_the_product(config: TrainConfig) -> None:
    assert config.effective_batch_size == config.micro_batch_size * config.gradient_accumulation_steps


def _measurement() -> Measurement:
    return make_measurement([make_block(320, 1.0), make_block(320, 3.0)], data_wait_seconds=1.0)


def test_a_measurement_is_total_work_over_total_time() -> None:
    measurement = _measurement()
    assert measurement.samples == 640
    assert measurement.seconds == 4.0
    assert measurement.samples_per_second == 160.0  # not 213.3, the mean of the blocks' rates
    assert measurement.seconds_per_step == 0.2
    assert measurement.data_wait_fraction == 0.25
    assert measurement.replace(data_wait_seconds=9.0).data_wait_fraction == 1.0


def test_a_measurement_without_blocks_is_refused() -> None:
    with pytest.raises(ValidationError, match="blocks"):
        _measurement().replace(blocks=())


def test_fingerprints_follow_what_a_measurement_depends_on() -> None:
    hardware, software = make_hardware(usable_cpu_count=2), make_software()
    assert len(hardware.fingerprint) == len(software.fingerprint) == 12
    assert hardware.replace(memory_available_bytes=1).fingerprint == hardware.fingerprint
    assert hardware.replace(usable_cpu_count=4).fingerprint != hardware.fingerprint
    assert hardware.replace(instruction_limits={"ONEDNN_MAX_CPU_ISA": "AVX2"}).fingerprint != hardware.fingerprint
    assert software.replace(torch="2.7.0").fingerprint != software.fingerprint
    assert software.replace(driver="570").fingerprint != software.replace(cuda="570").fingerprint


def test_measured_rates_are_found_by_their_arithmetic() -> None:
    ceilings = autotune.records.Ceilings(matmul=(autotune.records.MatmulRate(dtype="bf16", flops_per_second=2e12),))
    assert ceilings.flops_per_second("bf16") == 2e12
    assert ceilings.flops_per_second("fp32") is None


@pytest.mark.parametrize(("convolutions", "expected"), [(None, 1.0), (0.5, 1.0), (1.5, 1.5)])
def test_convolutions_have_their_own_rate_where_it_is_the_better_one(convolutions: float, expected: float) -> None:
    rate = autotune.records.MatmulRate(
        dtype="fp32",
        flops_per_second=2e11,
        sustained_flops_per_second=1e11,
        convolution_flops_per_second=convolutions and 2e11 * convolutions,
    )
    ceilings = autotune.records.Ceilings(matmul=(rate,)).of_convolutions()
    assert ceilings.flops_per_second("fp32") == 2e11 * expected
    assert ceilings.sustained_flops_per_second("fp32") == 1e11 * expected


def test_the_rates_of_emulated_arithmetic_and_what_was_not_kept_up_stay_as_they_are() -> None:
    rate = autotune.records.MatmulRate(dtype="bf16", flops_per_second=1e9, convolution_flops_per_second=4e9)
    assert rate.replace(emulated=True).of_convolutions().flops_per_second == 1e9
    assert rate.of_convolutions().sustained_flops_per_second is None


def _profile(label: str = "train.py:workload") -> Profile:
    return make_profile(
        verdict="keep",
        config=TrainConfig(),
        baseline_config=TrainConfig(),
        speedup=make_interval(1.02, 0.99, 1.05),
        quality=(make_check(test="metric", metric="m", margin=Margin(amount=0.01), verdict="inconclusive"),),
        target=ProfileTarget(label=label, fingerprint="0123456789ab"),
    )


def test_a_profile_is_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    _profile().save(path)
    assert Profile.load(path) == Profile.load(str(path)) == _profile()


def test_a_speedup_that_is_not_known_is_none_also_in_an_older_file(tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    _profile().replace(speedup=None).save(path)
    assert Profile.load(path).speedup is None
    old = json.loads(_profile().to_json())
    for name in ("candidate", "candidate_config"):
        old.pop(name)
    old["speedup"] = {"estimate": 1.0, "low": 1.0, "high": 1.0, "confidence_level": 0.98}
    old["speedup"]["method"] = "the baseline itself"
    path.write_text(json.dumps(old), encoding="utf-8")
    assert Profile.load(path).speedup is None
    assert Profile.load(path).candidate is None


def test_a_claim_without_a_speedup_is_refused() -> None:
    with pytest.raises(ValueError, match="no speed-up is given"):
        _profile().replace(verdict="improved", speedup=None)


@pytest.mark.parametrize("label", ["../../x", "/etc/passwd", "os:system", "$(touch owned)", "\x1b[31m", "a\x00b"])
def test_strings_of_a_profile_are_only_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, label: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "best.json"
    profile = _profile(label).replace(config=TrainConfig(user_knobs={label: label}))
    profile.save(path)
    assert Profile.load(path) == profile
    assert [file.name for file in tmp_path.iterdir()] == ["best.json"]


@pytest.mark.parametrize("where", [(), ("config",), ("target",), ("hardware",), ("speedup",), ("evidence",)])
@pytest.mark.parametrize("key", ["_target_", "class_path", "__class__", "env"])
@pytest.mark.fault("37", injected="_target_ and the like", outcome="refused")
def test_a_profile_with_an_instruction_is_refused(tmp_path: Path, where: tuple[str, ...], key: str) -> None:
    plain = json.loads(_profile().to_json())
    place = plain
    for step in where:
        place = place[step]
    place[key] = "os.system"
    path = tmp_path / "best.json"
    path.write_text(json.dumps(plain), encoding="utf-8")
    with pytest.raises(ProfileError, match=re.escape(": ".join((*where, f"unknown key {key!r}")))):
        Profile.load(path)


def test_an_enormous_profile_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    path.write_bytes(b'{"schema_version": 1, "x": "' + b"a" * (50 * 2**20) + b'"}')
    with pytest.raises(ProfileError, match=f"larger than {MAX_PROFILE_BYTES} bytes"):
        Profile.load(path)


@pytest.mark.parametrize(("allowed", "precision"), [(True, "high"), (False, "highest")])
def test_settings_of_when_tf32_was_a_switch_are_read(allowed: bool, precision: str) -> None:
    assert TrainConfig.model_validate({"allow_tf32": allowed}).matmul_precision == precision
    assert TrainConfig.model_validate_json(f'{{"allow_tf32": {str(allowed).lower()}}}').matmul_precision == precision


def test_a_block_that_stalls_counts_for_its_length_in_what_others_took() -> None:
    calm, stalled = Interference(foreign_cpu_fraction=0.05), Interference(foreign_cpu_fraction=0.45)
    blocks = [make_block(seconds=seconds, interference=seen) for seconds, seen in ((0.25, calm), (0.75, stalled))]
    assert make_measurement(blocks).taken_fraction == pytest.approx(0.35)
    assert make_measurement([make_block()]).taken_fraction == 0.0
