from __future__ import annotations

from pathlib import Path

import pytest

from autotune.errors import UsageError
from autotune.targets.resolve import ProjectSettings, read_project_settings


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
