from __future__ import annotations

from pathlib import Path

import pytest

from autotune.errors import UsageError
from autotune.targets.resolve import ProjectSettings, read_project_settings, resolve_target
from autotune.targets.script import script_label


@pytest.mark.parametrize(
    ("written", "texts"),
    [('"0.5%"', ("0.5%",)), ('["0.5%", "accuracy:0.1pp"]', ("0.5%", "accuracy:0.1pp")), ("[]", ())],
)
@pytest.mark.parametrize("name", ["autotune.toml", "pyproject.toml"])
def test_the_settings_may_hold_one_limit_or_several(
    tmp_path: Path, name: str, written: str, texts: tuple[str, ...]
) -> None:
    header = "[tool.autotune]\n" if name == "pyproject.toml" else ""
    (tmp_path / name).write_text(f'{header}budget = "20m"\nmax_drift = {written}\n')
    assert read_project_settings(tmp_path) == ProjectSettings(budget="20m", max_drift=texts)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("max_drift = 0.005", "max_drift = 0.005 is not text"),
        ('max_drift = ["0.5%", 1]', "max_drift = ['0.5%', 1] is not text"),
        ('budget = ["20m"]', "budget = ['20m'] is not text"),
        ('max_drifts = "1%"', "unknown key 'max_drifts'"),
    ],
)
def test_settings_of_another_type_are_refused(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "autotune.toml").write_text(line)
    with pytest.raises(UsageError) as caught:
        read_project_settings(tmp_path)
    assert message in caught.value.message


def test_without_a_file_nothing_is_set(tmp_path: Path) -> None:
    assert read_project_settings(tmp_path) == ProjectSettings()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("pyproject.toml", "tool = 3", None),
        ("pyproject.toml", "[tool]\nautotune = 3", "[tool.autotune] is not a table"),
        ("autotune.toml", "a = " + "[" * 100_000, "autotune.toml is nested too deeply"),
        ("pyproject.toml", "a = 1\n" * 2, "pyproject.toml is not valid TOML"),
        ("pyproject.toml", "# " + "x" * 2**20, "pyproject.toml is larger than 1048576 bytes"),
    ],
    ids=["tool is a number", "autotune is a number", "deep", "twice", "large"],
)
@pytest.mark.fault("F14", injected="pyproject.toml nested deeply, of wrong types, huge", outcome="one line")
def test_a_settings_file_of_any_shape_is_one_line_at_most(
    tmp_path: Path, name: str, text: str, message: str | None
) -> None:
    (tmp_path / name).write_text(text)
    if message is None:
        assert read_project_settings(tmp_path) == ProjectSettings()
        return
    with pytest.raises(UsageError) as caught:
        read_project_settings(tmp_path)
    assert message in caught.value.message


@pytest.mark.parametrize("written", ["\"python 'my train.py' --lr {micro_batch_size:8}\"", '["python", "my train.py"]'])
@pytest.mark.parametrize("name", ["autotune.toml", "pyproject.toml"])
def test_the_settings_may_name_a_scripts_command(tmp_path: Path, name: str, written: str) -> None:
    header = "[tool.autotune]\n" if name == "pyproject.toml" else ""
    (tmp_path / name).write_text(f"{header}command = {written}\n")
    (tmp_path / "my train.py").write_text("")
    resolved = resolve_target(None, folder=tmp_path)
    assert resolved.origin == "settings"
    assert resolved.target.script is not None
    assert resolved.target.script.command[:2] == ("python", "my train.py")
    assert resolved.target.spec == script_label(resolved.target.script.command)
    (tmp_path / "my train.py").unlink()
    with pytest.raises(UsageError, match=r"there is no script 'my train\.py'"):
        resolve_target(None, folder=tmp_path)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ('target = "-- python train.py"', "is a script's command", 'write command = "python train.py"'),
        ('target = "python train.py"', "is a script's command", 'write command = "python train.py"'),
        ('target = ["python", "train.py"]', "is not text", "write command = [...]"),
        ('target = "a.py:b"\ncommand = "python a.py"', "both target and command are set", "keep one"),
        ('command = "python \'a.py"', "No closing quotation", "as in a shell"),
        ('command = ["python", 3]', "is not text", "write command"),
        ('command = ""', "there is no command", ""),
    ],
)
def test_a_command_in_the_wrong_place_or_form_is_told_where_it_goes(
    tmp_path: Path, text: str, message: str, hint: str
) -> None:
    (tmp_path / "autotune.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        resolve_target(None, folder=tmp_path)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_a_target_with_a_blank_in_its_file_is_a_target(tmp_path: Path) -> None:
    (tmp_path / "autotune.toml").write_text('target = "my train.py:workload"')
    (tmp_path / "my train.py").write_text("from elsewhere import *")
    assert resolve_target(None, folder=tmp_path).target.spec == "my train.py:workload"
