"""A recipe of the user's own: tried first, told of what it cannot do here, and refused when it is not one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from simulated import Machine, make_report, open_search, run_simulated

from autotune.errors import ProfileError, UsageError
from autotune.knobs import Facts
from autotune.presets import find_preset
from autotune.records.config import TrainConfig
from autotune.records.reading import is_preset
from autotune.records.search import Preset
from autotune.search.answer.notes import describe_left_out
from autotune.search.run import SearchOptions, run_search
from autotune.space import build_space
from autotune.train.options import TrainingOptions

RECIPE = {"schema_version": 1, "name": "ours", "description": "What we do", "settings": {"num_workers": 2}}


def write(path: Path, **changes: object) -> Path:
    path.write_text(json.dumps({**RECIPE, **changes}))
    return path


def test_what_a_search_leaves_out_of_it_is_said() -> None:
    report = make_report(Machine())
    space = build_space(Facts(target=report.target, hardware=report.hardware))
    own = Preset.model_validate({**RECIPE, "settings": {"num_workers": 1, "matmul_precision": "high"}})
    assert describe_left_out(own, space) == [
        "ours: matmul_precision=high was left out: TF32 is arithmetic of NVIDIA GPUs",
    ]


def test_a_recipes_own_values_are_tried_unless_ruled_out() -> None:
    report = make_report(Machine())
    space = build_space(Facts(target=report.target, hardware=report.hardware))
    wider = space.admit(
        {"num_workers": 7, "matmul_precision": "high", "micro_batch_size": 7, "user_knobs.kernel": "new"}
    )
    assert wider.choices == {**space.choices, "num_workers": (*space.choices["num_workers"], 7)}


@pytest.mark.parametrize(
    ("other", "is_refused"), [({}, True), ({"precision": "bf16"}, False), ({"num_workers": 1}, True)]
)
def test_an_own_value_is_refused_where_nothing_else_can_be_why(other: dict[str, Any], is_refused: bool) -> None:
    log = open_search(Machine(knobs={"kernel": ("old", "new")})).log
    new = log.problem.baseline.replace(user_knobs={"kernel": "new"})
    log.refuse_user_values(new.replace(**other))
    assert log.is_refused(new) == is_refused
    assert not log.is_refused(log.problem.baseline.replace(**other))


def test_a_search_tries_the_own_preset_first_and_a_resumed_one_has_to_have_it(tmp_path: Path) -> None:
    own = Preset.model_validate({**RECIPE, "settings": {"num_workers": 1, "precision": "fp16"}})
    found = run_simulated(Machine(stop_after=4), tmp_path, presets=(own,))
    specs = [spec for spec in found.machine.specs if spec.purpose == "measure"]
    assert next(spec.config for spec in specs if spec.config != specs[0].config).num_workers == 1
    assert any("ours: precision=fp16 was left out" in note for note in found.profile.evidence.notes)
    (tmp_path / "toy.py").write_text("from elsewhere import *\n")
    with pytest.raises(UsageError, match=r"presets was ours \(num_workers=1 precision=fp16\) .* and is not given now"):
        run_search("toy.py:workload", SearchOptions(resume=True), folder=tmp_path)


def test_a_file_is_a_preset_by_its_path(tmp_path: Path) -> None:
    path = write(tmp_path / "ours.json")
    assert find_preset(str(path)).settings == {"num_workers": 2}
    assert is_preset(path)
    assert not is_preset(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 64}, "settings: unknown key 'batch'"),
        ({"num_worker": 2}, "settings: unknown key 'num_worker', did you mean 'num_workers'?"),
        ({"precision": "int8"}, "precision is 'int8': Input should be 'fp32', 'bf16' or 'fp16'"),
        ({"num_workers": -1}, "num_workers is -1: Input should be greater than or equal to 0"),
        ({"user_knobs.kernel": "\x1b[2J"}, "settings"),
    ],
)
def test_a_setting_that_is_none_is_named(tmp_path: Path, settings: dict[str, object], message: str) -> None:
    path = write(tmp_path / "ours.json", settings=settings)
    with pytest.raises(ProfileError, match=re.escape(message)):
        find_preset(str(path))


def test_a_preset_given_as_a_profile_is_a_preset(tmp_path: Path) -> None:
    path = write(tmp_path / "ours.json")
    told = TrainingOptions(profile="ours.json").classify_presets(tmp_path)
    assert (told.profile, told.preset) == (None, str(path))
    untold = TrainingOptions(profile="best.json")
    assert untold.classify_presets(tmp_path) == untold


def test_a_preset_may_set_every_knob_and_those_of_the_workload() -> None:
    settings = {name: value for name, value in TrainConfig().model_dump().items() if value is not None}
    del settings["user_knobs"]
    settings["user_knobs.variant"] = "fast"
    preset = Preset.model_validate({**RECIPE, "settings": settings})
    assert preset.apply_to(TrainConfig()) == TrainConfig(user_knobs={"variant": "fast"})
    assert Preset.model_validate({**RECIPE, "settings": settings}).settings == settings
