from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from probe_records import BASELINE as PROBED
from probe_records import target, timing
from record_factory import make_gpu, make_hardware, make_profile, make_report, make_software, make_state

import autotune.train.settings.choice as settings_module
import autotune.train.settings.differences as differences_module
import autotune.train.settings.presets as preset_module
from autotune.errors import CheckpointError, MachineError, ProfileError, TargetError, UsageError
from autotune.presets import find_preset, load_presets
from autotune.records import TrainConfig, read_record
from autotune.records.codec import Record
from autotune.records.facts import TargetFacts
from autotune.records.hardware import HardwareInfo, SoftwareInfo
from autotune.records.probe import ProbeReport
from autotune.records.profile import Profile, ProfileTarget
from autotune.records.run import CheckpointManifest, RunPlan
from autotune.records.script import Script, UserKnob
from autotune.records.search import Preset
from autotune.records.trial import Target
from autotune.search.store.folder import create_search_folder, write_report
from autotune.targets.source.fingerprint import fingerprint_target
from autotune.targets.workload import LoadedWorkload, check_workload
from autotune.train.settings.choice import (
    Settings,
    check_environment,
    choose_script_settings,
    choose_settings,
    find_differences,
)
from autotune.train.settings.presets import find_facts, fit_preset

HERE, VERSIONS = make_hardware(), make_software()
OWN = TrainConfig(micro_batch_size=16, user_knobs={"width": 8})
FAST = OWN.replace(num_threads=4, precision="bf16", num_workers=2, user_knobs={"width": 16})
LABEL, PRINT, DATA = "train.py:workload", "0123456789ab", "1000:0123456789ab"


class Toy:
    baseline = OWN
    knobs = {"width": (8, 16)}
    width = 8

    def build_model(self) -> Any: ...

    def build_optimizer(self, model: Any) -> Any: ...

    def train_dataset(self) -> Any: ...

    def compute_loss(self, model: Any, batch: Any) -> Any: ...


@pytest.fixture(autouse=True)
def this_machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what puts the code on a machine; on the plain one at first."""

    def stand_on(machine: HardwareInfo = HERE, software: SoftwareInfo = VERSIONS) -> None:
        for module in (differences_module, settings_module, preset_module):
            monkeypatch.setattr(module, "read_hardware", lambda: machine)
        for module in (differences_module, preset_module):
            monkeypatch.setattr(module, "read_software", lambda: software)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    stand_on()
    return stand_on


def load(fingerprint: str = PRINT, *, label: str = LABEL, **changes: Any) -> LoadedWorkload:
    workload = Toy()
    for name, value in changes.items():
        setattr(workload, name, value)
    return check_workload(workload, label=label, fingerprint=fingerprint)


def profile(**changes: Any) -> Profile:
    fields: dict[str, Any] = {
        "config": FAST.replace(optimizer_implementation="foreach"),
        "baseline_config": OWN.replace(num_threads=4, optimizer_implementation="foreach"),
        "target": ProfileTarget(label=LABEL, fingerprint=PRINT, data_fingerprint=DATA),
    }
    return make_profile(**(fields | changes))


def no_facts() -> TargetFacts:
    raise AssertionError("no probe is needed")


def choose(
    measured: Profile | None = None,
    loaded: LoadedWorkload | None = None,
    *,
    preset: str | None = None,
    data: str | None = DATA,
    facts: TargetFacts | None = None,
) -> tuple[Settings, list[str]]:
    told: list[str] = []
    settings = choose_settings(
        loaded or load(),
        profile=measured,
        preset=preset,
        data_fingerprint=data,
        find_facts=no_facts if facts is None else lambda: facts,
        note=told.append,
    )
    return settings, told


def test_without_anything_the_workloads_own_settings_are_used() -> None:
    settings, told = choose()
    assert (settings.config, settings.baseline_config, settings.origin) == (OWN, OWN, "baseline")
    assert settings.promised_samples_per_second is None
    assert not settings.needs_reverification
    assert told == []


def test_a_profile_that_was_measured_here_is_used_as_it_is() -> None:
    measured = profile()
    settings, told = choose(measured)
    assert (settings.config, settings.baseline_config) == (measured.config, measured.baseline_config)
    assert (settings.origin, settings.profile) == ("profile", measured)
    assert settings.promised_samples_per_second == 1300.0
    assert settings.differences == ()
    assert not settings.needs_reverification
    assert told == []


def test_an_answer_that_keeps_the_own_settings_promises_their_rate() -> None:
    own = profile().baseline_config
    settings, _ = choose(profile(verdict="keep", config=own))
    assert settings.promised_samples_per_second == 1000.0


ELSEWHERE: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "gpu": ({"hardware": make_hardware(gpus=(make_gpu(name="H100"),))}, ("other hardware", "H100 80 GiB; here no GPU")),
    "cpu": ({"hardware": make_hardware(cpu_name="Old CPU")}, ("other hardware (Old CPU; here CPU)",)),
    "cpus": ({"hardware": make_hardware(usable_cpu_count=64)}, ("64 usable CPUs; here 4 usable CPUs",)),
    "memory": ({"hardware": make_hardware(memory_limit_bytes=2**36)}, ("64 GiB of memory; here 16 GiB of memory",)),
    "torch": ({"software": VERSIONS.replace(torch="2.6.0")}, ("torch 2.6.0; here torch 2.13.0+cpu",)),
    "cuda": ({"software": VERSIONS.replace(cuda="12.4")}, ("CUDA 12.4; here no CUDA",)),
    "driver": ({"software": VERSIONS.replace(driver="550")}, ("driver 550; here no driver",)),
    "data": (
        {"target": ProfileTarget(label=LABEL, fingerprint=PRINT, data_fingerprint="900:0123456789ab")},
        ("has 1,000 samples, and had 900",),
    ),
    "samples": (
        {"target": ProfileTarget(label=LABEL, fingerprint=PRINT, data_fingerprint="1000:ffffffffffff")},
        ("some samples of the data set are not what they were when the profile was measured",),
    ),
    "source": (
        {"target": ProfileTarget(label=LABEL, fingerprint="f" * 12, data_fingerprint=DATA)},
        ("train.py:workload has changed since the search",),
    ),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_each_difference_is_told_in_one_sentence_and_asks_for_a_look(name: str) -> None:
    changes, parts = ELSEWHERE[name]
    settings, told = choose(profile(**changes))
    assert list(settings.differences) == told
    assert len(told) == 1
    assert all(part in told[0] for part in parts), told
    assert settings.needs_reverification
    assert settings.fall_back().config == settings.baseline_config
    assert settings.fall_back().origin == "baseline"


def test_another_device_of_the_same_machine_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    target = ProfileTarget(label=LABEL, fingerprint=PRINT, data_fingerprint=DATA, device="cpu")
    monkeypatch.setenv("AUTOTUNE_DEVICE", "cpu")
    assert choose(profile(target=target))[0].differences == ()
    monkeypatch.setattr("autotune.engine.device.choose_device", lambda _name: torch.device("cuda"))
    settings, told = choose(profile(target=target))
    assert told == [
        "the profile was measured on a CPU, this training runs on a GPU; --device cpu keeps it there",
    ]
    assert settings.needs_reverification


def test_several_differences_are_told_one_by_one() -> None:
    changes = {name: value for key in ("gpu", "torch", "source") for name, value in ELSEWHERE[key][0].items()}
    settings, told = choose(profile(**changes), data="999:0123456789ab")
    assert len(settings.differences) == len(told) == 4


def test_what_changes_by_the_minute_is_no_difference() -> None:
    busy = make_hardware(memory_available_bytes=1, shared_memory_free_bytes=1, gpus=())
    patch = VERSIONS.replace(python="3.13.1", autotune="9")
    assert choose(profile(hardware=busy, software=patch))[0].differences == ()


@pytest.mark.parametrize(("before", "now"), [(None, DATA), (DATA, None), (None, None)])
def test_data_that_cannot_be_compared_make_no_difference(before: str | None, now: str | None) -> None:
    told = ProfileTarget(label=LABEL, fingerprint=PRINT, data_fingerprint=before)
    assert choose(profile(target=told), data=now)[0].differences == ()


def test_nothing_a_profile_says_is_shown_raw() -> None:
    evil = "\x1b[2J\x07" + "x" * 500 + "\u202e"
    measured = profile(
        hardware=make_hardware(cpu_name=evil, gpus=(make_gpu(name=evil),)),
        software=VERSIONS.replace(torch=evil, cuda=evil, driver=evil),
        target=ProfileTarget(label=LABEL, fingerprint=evil, data_fingerprint=f"{'9' * 5000}:{evil}"),
    )
    told = find_differences(measured, target_fingerprint=PRINT, data_fingerprint=DATA)
    assert len(told) == 4
    assert all(sentence.isprintable() and len(sentence) < 500 for sentence in told)
    with pytest.raises(ProfileError) as caught:
        choose(profile(target=ProfileTarget(label=evil, fingerprint="f" * 12)))
    assert caught.value.message.isprintable()


def test_a_profile_of_another_target_is_refused() -> None:
    other = ProfileTarget(label="other.py:workload", fingerprint="f" * 12)
    with pytest.raises(ProfileError, match=r"was measured on other\.py:workload, and this is train\.py:workload"):
        choose(profile(target=other))


def test_a_renamed_target_with_the_same_source_is_the_same() -> None:
    settings, told = choose(profile(target=ProfileTarget(label="old.py:workload", fingerprint=PRINT)))
    assert settings.differences == ()
    assert told == []


def test_from_another_machine_only_the_changes_are_taken() -> None:
    # The other machine's threads and optimizer were found by its probe: nobody asked for them.
    settings, _ = choose(profile(hardware=make_hardware(usable_cpu_count=64)))
    assert settings.baseline_config == OWN
    assert settings.config == FAST.replace(num_threads=None)
    assert settings.promised_samples_per_second is None


def test_a_number_of_threads_that_was_chosen_is_taken() -> None:
    measured = profile(hardware=make_hardware(usable_cpu_count=64), config=FAST.replace(num_threads=2))
    assert choose(measured)[0].config.num_threads == 2


GROWN: dict[str, Any] = {
    "config": FAST.replace(
        micro_batch_size=32, learning_rate_scale=math.sqrt(2), num_threads=4, optimizer_implementation="foreach"
    ),
    "allowed": ("batch",),
    "learning_rate_rule": "sqrt",
}
"""A profile of a search that was allowed to try other effective batches."""


def changed_target(config: TrainConfig = FAST, **changes: Any) -> tuple[Settings, list[str]]:
    measured = profile(config=config.replace(num_threads=4, optimizer_implementation="foreach"))
    return choose(measured, load("f" * 12, **changes))


def test_a_changed_targets_own_settings_are_those_of_today() -> None:
    settings, told = changed_target(baseline=TrainConfig(micro_batch_size=16, drop_last=True) if False else OWN)
    assert settings.baseline_config == OWN
    assert settings.config == FAST.replace(num_threads=None)
    assert len(told) == 1


def test_the_effective_batch_stays_the_users_own() -> None:
    split = FAST.replace(micro_batch_size=4, gradient_accumulation_steps=4)
    assert changed_target(split)[0].config.micro_batch_size == 4
    settings, told = changed_target(split, baseline=OWN.replace(micro_batch_size=64))
    assert (settings.config.micro_batch_size, settings.config.gradient_accumulation_steps) == (64, 1)
    assert settings.config.precision == "bf16"
    assert "your own effective batch is 64 samples now, 16 when the profile was measured" in told[-1]


def test_the_knobs_of_the_batch_are_taken_together() -> None:
    own = OWN.replace(micro_batch_size=8, gradient_accumulation_steps=2)
    settings, told = choose(profile(**GROWN), load("f" * 12, baseline=own))
    assert settings.config.effective_batch_size == 32
    assert settings.config.learning_rate_scale == GROWN["config"].learning_rate_scale
    assert any("the effective batch is 32 samples instead of your own 16" in sentence for sentence in told)


@pytest.mark.parametrize("knobs", [{}, {"width": (8, 12)}])
def test_an_own_knob_that_the_target_has_no_more_is_left_out(knobs: dict[str, Any]) -> None:
    settings, told = changed_target(knobs=knobs)
    assert settings.config.user_knobs == settings.baseline_config.user_knobs
    assert "your own knob width stays as it is" in told[-1]


# What a profile may ask for, also where label and fingerprint are the target's own


def asked_for(**changes: Any) -> dict[str, Any]:
    return {"config": profile().config.replace(**changes)}


EVIL: dict[str, tuple[dict[str, Any], str]] = {
    "learning rate": (asked_for(learning_rate_scale=1e6), "multiplies learning rates by 1e.06"),
    "batch": (asked_for(micro_batch_size=4096), "an effective batch of 4,096 samples instead of 16"),
    "batch by accumulation": (asked_for(gradient_accumulation_steps=256), "an effective batch of 4,096"),
    "batch that no search tries": (
        {**asked_for(micro_batch_size=4096), "allowed": ("batch",)},
        "an effective batch of 4,096 samples instead of 16",
    ),
    "batch without its learning rate": (
        {**GROWN, "config": GROWN["config"].replace(learning_rate_scale=1.0)},
        "learning rate rule 'sqrt' that is 1.41421",
    ),
    "method as a knob": (asked_for(user_knobs={"width": 16, "train_dataset": "x"}), "'train_dataset' is no knob of"),
    "attribute as a knob": (asked_for(user_knobs={"width": 16, "secret_path": "/etc"}), "'secret_path' is no knob"),
    "value of a knob": (asked_for(user_knobs={"width": 10**15}), "'1000000000000000' is no value of the knob width"),
    "own settings": (
        {"config": FAST.replace(micro_batch_size=64), "baseline_config": OWN.replace(micro_batch_size=64)},
        "takes micro_batch_size=64 for your own setting, and it is 16",
    ),
    "own knob": (
        {"baseline_config": profile().baseline_config.replace(user_knobs={"width": 16})},
        "takes user_knobs.width=16 for your own setting, and it is 8",
    ),
    "knob in the own settings": (
        {"baseline_config": profile().baseline_config.replace(user_knobs={"width": 8, "shuffle": False})},
        "takes user_knobs.shuffle=False for your own setting",
    ),
}


@pytest.mark.fault("F11", injected="evil values under the right label and fingerprint", outcome="refused, exit 7")
@pytest.mark.parametrize("name", EVIL)
def test_a_profile_that_no_search_of_this_target_wrote_is_refused(name: str) -> None:
    changes, part = EVIL[name]
    with pytest.raises(ProfileError, match=part) as caught:
        choose(profile(**changes))
    assert caught.value.message.isprintable()
    assert caught.value.hint


@pytest.mark.fault("F11", injected="evil values, and another machine or source", outcome="own settings or refused")
@pytest.mark.parametrize("elsewhere", ["gpu", "source"])
@pytest.mark.parametrize("name", EVIL)
def test_a_profile_from_elsewhere_cannot_ask_for_more_either(name: str, elsewhere: str) -> None:
    changes, _ = EVIL[name]
    try:
        settings, _ = choose(profile(**(ELSEWHERE[elsewhere][0] | changes)))
    except ProfileError:
        return
    assert settings.baseline_config == OWN
    assert settings.config.effective_batch_size == OWN.effective_batch_size
    assert settings.config.learning_rate_scale == 1.0
    assert settings.config.user_knobs in ({"width": 8}, {"width": 16})


def test_a_larger_batch_that_the_user_allowed_is_taken_and_told() -> None:
    settings, told = choose(profile(**GROWN))
    assert settings.config == GROWN["config"]
    sentence = "the effective batch is 32 samples instead of your own 16, and learning rates are multiplied by 1.41"
    assert told[0].startswith(sentence)


def test_nothing_is_set_on_a_workload_that_is_no_knob_of_it() -> None:
    loaded = load()
    for own in ({"train_dataset": 1}, {"width": 9}, {"width": "8"}):
        with pytest.raises(ProfileError, match="the settings do not fit"):
            loaded.set_knobs(OWN.replace(user_knobs=own))
    assert callable(loaded.workload.train_dataset)
    loaded.set_knobs(OWN.replace(user_knobs={"width": 16}))
    assert loaded.workload.width == 16  # type: ignore[attr-defined]


def test_a_profile_and_a_preset_are_too_much() -> None:
    with pytest.raises(UsageError, match="both --profile and --preset"):
        choose(profile(), preset="balanced")


# Presets


def facts(**changes: Any) -> TargetFacts:
    return target(**{"baseline": PROBED, "label": LABEL, "fingerprint": PRINT, **changes})


@pytest.mark.parametrize(
    ("name", "hint"), [("balance", "did you mean balanced? "), ("Baseline", "did you mean baseline? "), ("zzz", "")]
)
def test_an_unknown_preset_is_refused_with_those_there_are(name: str, hint: str) -> None:
    with pytest.raises(ProfileError, match="there is no preset") as caught:
        choose(preset=name)
    names = "balanced, baseline, low-memory, reproducible"
    assert caught.value.hint == f"{hint}the presets are {names}; a file of your own ends in .json"


def test_a_preset_is_put_onto_the_targets_own_settings() -> None:
    settings, told = choose(preset="balanced", facts=facts())
    assert settings.origin == "preset balanced"
    assert settings.baseline_config == OWN
    assert settings.config == OWN.replace(
        precision="bf16",
        optimizer_implementation="fused",
        num_workers=2,
        persistent_workers=True,
        host_allocator="glibc-tuned",
    )
    assert settings.promised_samples_per_second is None
    assert not settings.needs_reverification
    assert "not measured here: `autotune search` would tell whether it is faster" in told[0]
    assert "matmul_precision=high (TF32 is arithmetic of NVIDIA GPUs)" in told[1]
    assert "pin_memory=True (pinned memory only speeds copies to a GPU)" in told[1]


@pytest.mark.parametrize("preset", load_presets(), ids=lambda preset: preset.name)
def test_no_preset_changes_the_effective_batch_or_an_own_knob(preset: Preset) -> None:
    settings, told = choose(preset=preset.name, facts=facts())
    assert settings.config.effective_batch_size == OWN.effective_batch_size
    assert settings.config.user_knobs == OWN.user_knobs
    assert told


def test_the_preset_that_changes_nothing_says_so() -> None:
    settings, told = choose(preset="baseline", facts=facts())
    assert settings.config == OWN
    assert "sets nothing" in told[0]


def test_what_this_machine_cannot_do_is_left_out(this_machine: Callable[..., None]) -> None:
    this_machine(make_hardware(usable_cpu_count=2, has_cpp_compiler=False))
    settings = {"precision": "bf16", "compile_mode": "default", "memory_format": "channels_last", "num_workers": 4}
    everything = Preset(name="ours", description="All we know", settings=settings)
    fitted = fit_preset(everything, facts(supports_bf16=False))
    assert (fitted.config.num_workers, fitted.config.compile_mode, fitted.config.precision) == (0, "off", "fp32")
    left_out = " | ".join(fitted.left_out)
    assert "num_workers=4 (here it may be 0, 1, 2)" in left_out
    assert "C++ compiler" in left_out
    assert "bf16 autocast does not run on this cpu" in left_out
    assert "memory_format=channels_last (the model has no 2-d convolution)" in left_out


def test_on_a_gpu_its_own_settings_are_used(this_machine: Callable[..., None]) -> None:
    this_machine(make_hardware(gpus=(make_gpu(),)))
    config = fit_preset(find_preset("balanced"), facts(device="cuda")).config
    assert (config.pin_memory, config.non_blocking, config.host_allocator) == (True, True, "default")


def test_what_is_more_than_a_preset_makes_it_out_to_be_is_left_out() -> None:
    drawn = facts(numerics={"num_workers": "rounding", "persistent_workers": "semantic"})
    exact = fit_preset(find_preset("reproducible"), drawn)
    assert (exact.config.num_workers, exact.config.host_allocator) == (0, "glibc-tuned")
    told = "num_workers=2 (here it changes what is computed, and the preset promises not to)"
    assert any(told in text for text in exact.left_out)
    rounding = fit_preset(find_preset("balanced"), drawn)
    assert (rounding.config.num_workers, rounding.config.persistent_workers) == (2, False)


def open_folder(folder: Path, source: str = "print('hello')\n") -> Target:
    (folder / "train.py").write_text(source)
    return Target(spec=LABEL, folder=str(folder))


def report(**changes: Any) -> ProbeReport:
    return make_report(**{"target": facts(), "measurement": timing(), **changes})


class Probing:
    """Stands in for the probe; counts its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        monkeypatch.setattr(preset_module, "probe_target", self)

    def __call__(self, *_arguments: Any, **_options: Any) -> tuple[ProbeReport, None]:
        self.calls += 1
        return report(), None


def ask(folder: Path, *, stop: bool = False) -> tuple[TargetFacts, list[str]]:
    told: list[str] = []
    found = find_facts(open_folder(folder), fingerprint=PRINT, should_stop=lambda: stop, say=told.append)
    return found, told


def test_a_probe_is_made_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probing = Probing(monkeypatch)
    assert ask(tmp_path) == (facts(), ["a probe finds out what this machine and this training can do"])
    assert ask(tmp_path) == (facts(), [])
    assert probing.calls == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"hardware": make_hardware(usable_cpu_count=64)},
        {"software": VERSIONS.replace(torch="2.6.0")},
        {"target": facts(fingerprint="f" * 12)},
        {"target": facts(label="other.py:workload")},
    ],
    ids=["hardware", "software", "source", "target"],
)
def test_a_probe_of_something_else_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    probing = Probing(monkeypatch)
    write_report(tmp_path, report(**changes))
    ask(tmp_path)
    assert probing.calls == 1
    write_report(tmp_path, report())
    ask(tmp_path)
    assert probing.calls == 1


def test_the_probe_of_a_search_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probing = Probing(monkeypatch)
    search = create_search_folder(tmp_path, LABEL)
    search.write_state(make_state(target=open_folder(tmp_path)))
    search.write_probe(report())
    assert ask(tmp_path)[1] == []
    assert probing.calls == 0


@pytest.mark.parametrize("content", ["{", '{"schema_version": 2}'])
def test_a_damaged_or_newer_report_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    probing = Probing(monkeypatch)
    write_report(tmp_path, report()).write_text(content)
    ask(tmp_path)
    assert probing.calls == 1


def test_a_probe_that_was_stopped_is_no_failure_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: Any, **_options: Any) -> None:
        raise TargetError("it fails with its own settings")

    monkeypatch.setattr(preset_module, "probe_target", fail)
    with pytest.raises(TargetError, match="own settings"):
        ask(tmp_path)
    with pytest.raises(UsageError, match="stopped before"):
        ask(tmp_path, stop=True)


# Scripts


@pytest.fixture
def script(tmp_path: Path) -> Target:
    (tmp_path / "train.py").write_text("print('hello')\n")
    knob = UserKnob(name="width", values=(8, 16))
    return Target(
        spec="python train.py --width {width}",
        folder=str(tmp_path),
        script=Script(command=("python", "train.py", "--width", "{width}"), knobs=(knob,)),
    )


def choose_for(script: Target, measured: Profile | None = None, **changes: Any) -> tuple[Settings, list[str]]:
    told: list[str] = []
    arguments: dict[str, Any] = {"profile": measured, "preset": None, "find_facts": no_facts, "note": told.append}
    return choose_script_settings(script, **(arguments | changes)), told


def of_script(script: Target, **changes: Any) -> Profile:
    fields: dict[str, Any] = {"label": script.spec, "fingerprint": fingerprint_target(script)}
    return profile(target=ProfileTarget(**(fields | {"training_loaders": ("first",)} | changes)))


def test_a_scripts_profile_is_used_as_it_is(script: Target) -> None:
    measured = of_script(script)
    settings, told = choose_for(script, measured)
    assert (settings.config, settings.baseline_config) == (measured.config, measured.baseline_config)
    assert (settings.training_loaders, settings.differences, told) == (("first",), (), [])
    assert settings.promised_samples_per_second == 1300.0


def test_a_script_that_changed_or_has_other_flags_asks_for_a_look(script: Target) -> None:
    measured = of_script(script)
    Path(script.folder, "train.py").write_text("print('goodbye')\n")
    settings, told = choose_for(script, measured)
    assert "has changed since the search" in told[0]
    assert settings.needs_reverification
    other = of_script(script, label="python train.py", fingerprint="f" * 12)
    settings, told = choose_for(script, other)
    assert told == ["the search was of 'python train.py': what the words that differ change was not measured"]
    assert settings.needs_reverification
    assert settings.promised_samples_per_second is None


def test_a_script_that_trains_for_another_length_is_the_one_that_was_searched(script: Target) -> None:
    assert script.script is not None

    def start(*more: str) -> Target:
        words = (*script.script.command, *more) if script.script else ()
        return script.replace(spec=" ".join(words), script=script.script.replace(command=words))

    measured = of_script(start("--epochs", "1000"))
    settings, told = choose_for(start("--epochs", "30"), measured)
    assert (told, settings.needs_reverification, settings.promised_samples_per_second) == ([], False, 1300.0)
    settings, told = choose_for(start("--epochs", "30", "--depth", "8"), measured)
    assert settings.needs_reverification
    assert "--epochs 1000': what the words that differ change was not measured" in told[0]
    Path(script.folder, "train.py").write_text("print('goodbye')\n")
    settings, told = choose_for(start("--epochs", "30"), measured)
    assert settings.needs_reverification
    assert len(told) == 1


def test_a_scripts_settings_of_another_machine_are_kept_whole(script: Target, this_machine: Any) -> None:
    this_machine(make_hardware(usable_cpu_count=2))
    measured = of_script(script)
    settings, told = choose_for(script, measured)
    assert (settings.config, settings.baseline_config) == (measured.config, measured.baseline_config)
    assert len(told) == 1


def test_a_script_alone_runs_as_it_is_and_with_a_preset_on_what_it_does(script: Target) -> None:
    assert choose_for(script)[0].origin == "baseline"
    probed = facts(training_loaders=("second",), fixed={"num_workers": "it holds a generator"})
    settings, told = choose_for(script, preset="balanced", find_facts=lambda: probed)
    assert (settings.baseline_config, settings.training_loaders) == (PROBED, ("second",))
    assert (settings.config.precision, settings.config.num_workers) == ("bf16", 0)
    assert "num_workers=2 (it holds a generator)" in told[1]
    with pytest.raises(UsageError, match="both"):
        choose_for(script, profile(), preset="balanced")


SCRIPT_EVIL: dict[str, tuple[dict[str, Any], str]] = {
    "learning rate": (asked_for(learning_rate_scale=2.0), "scales the learning rate"),
    "batch": (asked_for(micro_batch_size=4096), "an effective batch of 4,096"),
    "value of a knob": (asked_for(user_knobs={"width": "--config=/etc/evil"}), "'width' to '--config=/etc/evil'"),
    "knob": (asked_for(user_knobs={"width": 8, "depth": 3}), "'depth' to '3', which is no value of a knob"),
    "own knob": (
        {"baseline_config": profile().baseline_config.replace(user_knobs={"width": 16})},
        "takes width=16 for your own setting, and it is 8",
    ),
}


@pytest.mark.fault("F11", injected="evil values in a profile of a script", outcome="refused, exit 7")
@pytest.mark.parametrize("name", SCRIPT_EVIL)
def test_a_scripts_profile_that_no_search_of_it_wrote_is_refused(script: Target, name: str) -> None:
    changes, part = SCRIPT_EVIL[name]
    with pytest.raises(ProfileError, match=part):
        choose_for(script, of_script(script).replace(**changes))


def test_the_value_in_a_scripts_command_is_its_own_setting(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hello')\n")
    words = ("python", "train.py", "--bs", "{micro_batch_size:32}", "--accum", "{gradient_accumulation_steps:1}")
    target = Target(spec=shlex.join(words), folder=str(tmp_path), script=Script(command=words))
    with pytest.raises(ProfileError, match="takes micro_batch_size=16 for your own setting, and it is 32"):
        choose_for(target, of_script(target))


def test_a_profile_of_another_script_is_refused(script: Target) -> None:
    other = of_script(script, label="python other.py --width {width}", fingerprint="f" * 12)
    with pytest.raises(ProfileError, match=r"was measured on python other\.py .*, and this is python train\.py"):
        choose_for(script, other)


# The environment


def test_an_allocator_is_refused_or_told_where_it_came_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    with pytest.raises(MachineError, match="jemalloc"):
        check_environment(OWN.replace(host_allocator="jemalloc"), HERE, told.append)
    tuned = OWN.replace(host_allocator="glibc-tuned")
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    check_environment(tuned, HERE, told.append)
    assert "MALLOC_MMAP_THRESHOLD_=1073741824" in told[0]
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.setenv(name, str(2**30))
    check_environment(tuned, HERE, told.append)
    assert len(told) == 1


# Newer files


@pytest.mark.parametrize(
    ("name", "kind", "error"),
    [
        ("best.json", Profile, ProfileError),
        ("run.json", RunPlan, ProfileError),
        ("manifest.json", CheckpointManifest, CheckpointError),
        ("probe.json", ProbeReport, ProfileError),
    ],
)
def test_a_file_of_a_newer_version_is_refused_by_name(
    tmp_path: Path, name: str, kind: type[Record], error: type[ProfileError]
) -> None:
    path = tmp_path / name
    path.write_text('{"schema_version": 2, "something": "new"}')
    with pytest.raises(error) as caught:
        read_record(path, kind, error=error)
    assert caught.value.message == f"{path} was written by a newer version (schema 2, this one reads 1)"
    assert caught.value.hint == "upgrade autotune"
