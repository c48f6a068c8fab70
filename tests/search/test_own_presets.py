"""A recipe of the user's own: tried first, told of what it cannot do here, and refused when it is not one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from simulated import Machine, make_report

from autotune.errors import ProfileError
from autotune.knobs import Facts
from autotune.presets import find_preset, is_preset
from autotune.records.config import TrainConfig
from autotune.records.search import Preset
from autotune.search.strategy import describe_left_out, suggest
from autotune.space import build_space
from autotune.train.options import TrainingOptions

RECIPE = {"schema_version": 1, "name": "ours", "description": "What we do", "settings": {"num_workers": 2}}


def write(path: Path, **changes: object) -> Path:
    path.write_text(json.dumps({**RECIPE, **changes}))
    return path


def test_a_preset_of_ones_own_is_tried_before_anything_else() -> None:
    report = make_report(Machine())
    space = build_space(Facts(target=report.target, hardware=report.hardware))
    own = Preset.model_validate({**RECIPE, "settings": {"precision": "bf16", "num_workers": 1}})
    first = suggest(space, report, space.baseline, [space.baseline], 600.0, presets=(own,))
    assert first == space.baseline.replace(precision="bf16", num_workers=1)
    assert first != suggest(space, report, space.baseline, [space.baseline], 600.0)


def test_what_a_search_leaves_out_of_it_is_said() -> None:
    report = make_report(Machine())
    space = build_space(Facts(target=report.target, hardware=report.hardware))
    own = Preset.model_validate({**RECIPE, "settings": {"num_workers": 1, "allow_tf32": True}})
    assert describe_left_out(own, space) == [
        "ours: allow_tf32=True was left out: TF32 is arithmetic of NVIDIA GPUs",
    ]


def test_a_file_is_a_preset_by_its_path(tmp_path: Path) -> None:
    path = write(tmp_path / "ours.json")
    assert find_preset(str(path)).settings == {"num_workers": 2}
    assert is_preset(path)
    assert not is_preset(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 64}, "batch is 64: Extra inputs are not permitted"),
        ({"precision": "int8"}, "precision is 'int8': Input should be 'fp32', 'bf16' or 'fp16'"),
        ({"num_workers": -1}, "num_workers is -1: Input should be greater than or equal to 0"),
    ],
)
def test_a_setting_that_is_none_is_named(tmp_path: Path, settings: dict[str, object], message: str) -> None:
    path = write(tmp_path / "ours.json", settings=settings)
    with pytest.raises(ProfileError, match=message):
        find_preset(str(path))


def test_a_preset_given_as_a_profile_is_a_preset(tmp_path: Path) -> None:
    path = write(tmp_path / "ours.json")
    told = TrainingOptions(profile="ours.json").tell_presets(tmp_path)
    assert (told.profile, told.preset) == (None, str(path))
    untold = TrainingOptions(profile="best.json")
    assert untold.tell_presets(tmp_path) == untold


def test_a_preset_may_set_every_knob_and_those_of_the_workload() -> None:
    settings = {name: value for name, value in TrainConfig().model_dump().items() if value is not None}
    del settings["user_knobs"]
    settings["user_knobs.variant"] = "fast"
    preset = Preset.model_validate({**RECIPE, "settings": settings})
    assert preset.apply_to(TrainConfig()) == TrainConfig(user_knobs={"variant": "fast"})
    assert Preset.model_validate({**RECIPE, "settings": settings}).settings == settings
