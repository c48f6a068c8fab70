"""Data that is no data: deep, endless, huge, not UTF-8, a pipe in place of a file. One line each, and its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compared_runs import plant_run
from emit_records import make_report
from record_factory import make_interval, make_profile
from typer.testing import CliRunner

from autotune.cli import app
from autotune.cli.view.terminal import shorten
from autotune.errors import AutotuneError, ProfileError, UsageError
from autotune.machine.hardware import read_hardware, read_software
from autotune.records import Evidence, ProbeReport, Profile, ProfileTarget, TrainConfig, parse_record
from autotune.search.store.folder import check_output, create_search_folder
from autotune.targets.resolve import read_project_settings, resolve_target
from autotune.targets.script import read_script
from autotune.train.options import TrainingOptions
from autotune.units import parse_bytes, parse_duration

EVIL = "a\x1b[2J\x07\x9b31m\u202eb"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save_profile(path: Path, **changes: Any) -> Profile:
    fields: dict[str, Any] = {
        "verdict": "keep",
        "config": TrainConfig(),
        "baseline_config": TrainConfig(),
        "speedup": None,
        "target": ProfileTarget(label="train.py:workload", fingerprint="m-0123456789ab"),
        "hardware": read_hardware(),
        "software": read_software(),
        "evidence": Evidence(),
    }
    profile = make_profile(**(fields | changes))
    profile.save(path)
    return profile


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    plain = json.loads(path.read_text())
    change(plain)
    path.write_text(json.dumps(plain))


def invoke(*words: str) -> tuple[int, str]:
    """Return the exit code of a command in this process, and its one line on standard error with its hint."""
    result = CliRunner().invoke(app, [*words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    assert all(character.isprintable() or character == "\n" for character in result.output)
    return result.exit_code, result.stderr


def run(folder: str | bytes | Path, *words: str, stdout: int | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "autotune", *words],
        cwd=folder,
        stdout=subprocess.PIPE if stdout is None else stdout,
        stderr=subprocess.PIPE,
        timeout=240,
        check=False,
    )


def nested(depth: int) -> str:
    return '{"target":' * depth + "1" + "}" * depth


@pytest.mark.fault("F14", injected="an existing best.json nested 200,000 deep or /dev/zero", outcome="exit 2")
@pytest.mark.parametrize("content", [nested(200_000), nested(100), "[" * 500_000, "[]", '{"target": 3}', "\x00" * 99])
def test_an_output_that_is_no_profile_is_not_replaced(folder: Path, content: str) -> None:
    out = folder / "best.json"
    out.write_text(content)
    with pytest.raises(UsageError, match="exists and is not a profile"):
        check_output(out, "train.py:workload", force=False)
    assert out.read_text() == content


@pytest.mark.fault("F13", injected="best.json a pipe, a device, a folder", outcome="exit 2, no wait")
@pytest.mark.parametrize("kind", ["a pipe", "a device", "a folder"])
def test_an_output_that_is_no_file_is_refused(folder: Path, kind: str) -> None:
    out = folder / "best.json"
    if kind == "a pipe":
        os.mkfifo(out)
    elif kind == "a folder":
        out.mkdir()
    else:
        out.symlink_to("/dev/zero")
    for force in (False, True):
        with pytest.raises(UsageError, match=f"best.json is {kind}, not a file"):
            check_output(out, "train.py:workload", force=force)


@pytest.mark.fault("F14", injected="whole numbers of 39 and 401 digits in a profile", outcome="exit 7")
@pytest.mark.parametrize("number", [10**400, 10**38, 2**63, -(10**400)])
def test_a_profile_with_a_number_that_counts_nothing_is_refused(folder: Path, number: int) -> None:
    save_profile(folder / "best.json")
    change_json(folder / "best.json", lambda plain: plain["hardware"].update(memory_limit_bytes=number))
    code, said = invoke("train", "demo", "--profile", "best.json")
    assert (code, "is too large" in said) == (7, True)


@pytest.mark.fault("F14", injected="whole numbers of 39 and 401 digits in a run folder", outcome="exit 7, or left out")
@pytest.mark.parametrize("number", [10**400, 10**38, 2**63])
def test_a_run_with_a_number_that_counts_nothing_is_refused_or_read_without_it(folder: Path, number: int) -> None:
    plant_run(folder / "a")
    for name in ("steps", "samples", "peak_memory_bytes"):
        other = plant_run(folder / name)
        change_json(other / "summary.json", lambda plain, name=name: plain.update({name: number}))  # type: ignore[misc]
        assert invoke("compare", "a", name)[0] == 7
    logged = plant_run(folder / "logged", is_killed=True)
    with (logged / "metrics.jsonl").open("a") as file:
        for line in ({"step": number, "samples": 8, "loss": 1.0}, {"step": 1, "samples": number, "loss": number}):
            file.write(json.dumps(line) + "\n")
        file.write('{"step": 1, "samples": 900, "loss": 1e308, "samples_per_second": 1e-308}\n')
    assert invoke("compare", "a", "logged") == (0, "")


SETTINGS = {
    "nested arrays": ("x = " + "[" * 100_000 + "]" * 100_000, "nested too deeply"),
    "nested tables": ("x = " + "{a = " * 100_000, "nested too deeply"),
    "a byte order mark": ("\ufeff[tool.autotune]\n", "is not valid TOML"),
    "a NUL": ("[tool.autotune]\ntarget = '\x00'\n", "is not valid TOML"),
    "a huge number": ("[tool.autotune]\nbudget = " + "9" * 5000, "is not valid TOML|is not text"),
    "a number of 4,000 digits": ("[tool.autotune]\nbudget = " + "9" * 4000, "is not text"),
    "NaN": ("[tool.autotune]\nbudget = nan\n", "is not text"),
    "a table in place of text": ("[tool.autotune.target]\na = 1\n", "is not text"),
    "no table": ("[tool]\nautotune = 3\n", "is not a table"),
    "an unknown key": (f"[tool.autotune]\n{json.dumps(EVIL)} = 1\n", "unknown key"),
    "a NUL in the command": ('[tool.autotune]\ncommand = "python train.py \\u0000"\n', "NUL"),
    "a NUL in the target": ('[tool.autotune]\ntarget = "train\\u0000.py:workload"\n', "NUL"),
    "a NUL in the output": ('[tool.autotune]\nout = "a\\u0000b"\n', "NUL"),
}


@pytest.mark.fault("F14", injected="a pyproject.toml that is deep, huge, binary or of wrong types", outcome="exit 2")
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_cannot_be_used_are_named(folder: Path, name: str) -> None:
    text, part = SETTINGS[name]
    (folder / "pyproject.toml").write_text(text)
    (folder / "train.py").write_text("")
    with pytest.raises(UsageError, match=part) as caught:
        resolve_target(None, folder=folder)
    assert "\n" not in caught.value.message
    assert len(shorten(caught.value.message)) < 2500


@pytest.mark.fault("F14", injected="tool = 3, another tool's wrong types, no UTF-8", outcome="left alone, or exit 2")
def test_what_is_not_ours_to_tell_in_the_settings_is_left_alone(folder: Path) -> None:
    for text in ("tool = 3\n", "tool = []\n", "[tool.other]\nx = nan\n", ""):
        (folder / "pyproject.toml").write_text(text)
        assert read_project_settings(folder).target is None
    (folder / "pyproject.toml").write_bytes(b'[tool.autotune]\ntarget = "caf\xe9"\n')
    with pytest.raises(UsageError, match="is not valid TOML"):
        read_project_settings(folder)
    (folder / "pyproject.toml").unlink()
    os.mkfifo(folder / "pyproject.toml")
    assert read_project_settings(folder).target is None


@pytest.mark.fault("F14", injected="a working folder whose name is not UTF-8", outcome="one line, exit 2")
def test_a_folder_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(odd)
    for words in (["probe", "demo"], ["search", "--budget", "20s"], ["train"], ["compare", "a", "b"], ["report"]):
        done = run(odd, *words)
        assert done.returncode == 2, done.stderr
        assert b"is not UTF-8" in done.stderr
        assert b"Traceback" not in done.stderr
    assert os.listdir(odd) == []
    with pytest.raises(UsageError, match="is not UTF-8"):
        resolve_target("train.py:workload", folder=Path(os.fsdecode(odd)))
    for options in (TrainingOptions(out="caf\udce9"), TrainingOptions(preset="caf\udce9.json")):
        with pytest.raises(UsageError, match="is not UTF-8"):
            options.check()


@pytest.mark.slow
@pytest.mark.fault("48", injected="standard output is /dev/full", outcome="one line, exit 5")
@pytest.mark.fault("F14", injected="standard output is /dev/full", outcome="one line, exit 5")
def test_output_that_cannot_be_written_is_one_line(folder: Path) -> None:
    save_profile(folder / "best.json")
    plant_run(folder / "a")
    (folder / "search.py").write_text(
        "import sys\n"
        "import autotune.search.run as search\n"
        "from autotune.__main__ import main\n"
        "from autotune.records import Profile\n"
        "search.run_search = lambda *_, **__: Profile.load('best.json')\n"
        "sys.argv[1:] = ['search', 'demo', *sys.argv[1:]]\n"
        "main()\n"
    )
    autotune = f"{sys.executable} -P -m autotune"
    for command in (
        f"{autotune} compare a a",
        f"{autotune} compare a a --json",
        f"{autotune} export --profile best.json --to torch",
        f"{autotune} export --profile best.json --to hf --json",
        f"{autotune} compare a nothing --json",
        f"{sys.executable} search.py",
        f"{sys.executable} search.py --json",
    ):
        done = subprocess.run(
            ["bash", "-c", f"{command} >/dev/full"], cwd=folder, stderr=subprocess.PIPE, text=True, timeout=240
        )
        expected = 2 if "nothing" in command else 5
        assert done.returncode == expected, (command, done.stderr)
        assert done.stderr.count("error: ") == 1, (command, done.stderr)
        assert "Traceback" not in done.stderr
        assert expected == 2 or "standard output cannot be written: No space left on device" in done.stderr


@pytest.mark.fault("F15", injected="ESC, C1 controls and right-to-left overrides in records", outcome="none is printed")
def test_no_command_prints_what_a_terminal_would_obey(folder: Path) -> None:
    own = {f"knob{EVIL}": f"value{EVIL}"}
    config, baseline = TrainConfig(user_knobs=own), TrainConfig(user_knobs={f"knob{EVIL}": "x"})
    target = ProfileTarget(label=f"train.py:{EVIL}", fingerprint=EVIL, data_fingerprint=EVIL)
    save_profile(
        folder / "best.json",
        config=config,
        baseline_config=baseline,
        target=target,
        hardware=read_hardware().replace(cpu_name=EVIL, preloaded_malloc=EVIL),
        software=read_software().replace(torch=EVIL),
        evidence=Evidence(notes=(EVIL,)),
        speedup=make_interval(1.0, method=EVIL),
    )
    for name in ("a", "b"):
        plant_run(
            folder / name, config=config, plan={"target": target, "origin": EVIL}, summary={"metrics": {EVIL: 1.0}}
        )
    for words, code in (
        (["export", "--profile", "best.json", "--to", "torch"], 0),
        (["export", "--profile", "best.json", "--to", "hf", "--json"], 0),
        (["compare", "a", "b"], 0),
        (["compare", "a", "b", "--json"], 0),
        (["compare", f"a{EVIL}", "b"], 2),
        (["train", "demo", "--profile", "best.json"], 7),
        (["train", f"{EVIL}.py:x"], 2),
        (["train", "demo", "--preset", EVIL], 7),
        (["export", "--profile", EVIL, "--to", "torch"], 7),
        (["export", "--profile", "best.json", "--to", EVIL], 2),
        (["search", "--budget", EVIL], 2),
        (["search", "--max-drift", EVIL], 2),
        (["search", "--knob", EVIL, "--", "python", "train.py"], 2),
        (["probe", "--", "python", EVIL], 2),
    ):
        assert invoke(*words)[0] == code, words


WAYS_IN = [
    ["export", "--to", "torch", "--profile", "{}"],
    ["train", "demo", "--profile", "{}"],
    ["train", "demo", "--preset", "{}.json"],
    ["search", "--budget", "20s", "--preset", "{}.json"],
    ["compare", "{}", "{}"],
    ["report", "--out", "{}"],
]
ODD_THINGS = ["a pipe", "a device", "a folder", "a loop", "a socket", "a link to nothing", "a link to a secret"]


@pytest.mark.fault("37", injected="a pipe, device or link as profile, preset, run, output", outcome="refused")
@pytest.mark.parametrize("kind", ODD_THINGS)
def test_what_is_no_file_is_refused_wherever_one_is_named(folder: Path, kind: str) -> None:
    secret = folder / "secret"
    secret.write_text("root:x:0:0\n")
    (folder / "in").mkdir()
    os.chdir(folder / "in")
    search = create_search_folder(folder / "in", "train.py:workload")
    save_profile(search.profile)
    for suffix in ("", ".json"):
        _plant(folder / f"odd{suffix}", kind, secret)
    began = time.monotonic()
    for words in WAYS_IN:
        code, said = invoke(*(word.format("../odd") for word in words))
        assert code in (2, 5, 7), (words, code, said)
        assert "root:x" not in said
    assert time.monotonic() - began < 60
    assert secret.read_text() == "root:x:0:0\n"
    assert not os.path.lexists(folder / "nothing")


def _plant(path: Path, kind: str, secret: Path) -> None:
    import socket

    match kind:
        case "a pipe":
            os.mkfifo(path)
        case "a device":
            path.symlink_to("/dev/urandom")
        case "a folder":
            path.mkdir()
        case "a loop":
            path.symlink_to(path.name)
        case "a socket":
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(str(path))
        case "a link to nothing":
            path.symlink_to(path.parent / "nothing" / "below")
        case _:
            path.symlink_to(secret)


@pytest.mark.fault("37", injected="a label and a spec with ../, /, NUL and blanks", outcome="no path is made of them")
@pytest.mark.parametrize("label", ["../../up", "/etc/passwd:x", "..", "a/../../b", "\x00", " ", ".", "~", "a\nb"])
def test_no_folder_is_made_of_a_label(folder: Path, label: str) -> None:
    inner = folder / "in"
    inner.mkdir()
    place = create_search_folder(inner, label)
    assert place.path.parent == inner / ".autotune"
    assert sorted(path.name for path in folder.iterdir()) == ["in"]


@pytest.mark.fault("F14", injected="names of more letters than a file's may have", outcome="exit 2 or 7, one line")
def test_names_that_are_too_long_for_a_file_are_not_there(folder: Path) -> None:
    (folder / "package").mkdir()
    long = "a" * 5000
    for words in (
        ["train", f"{long}.py:x"],
        ["train", f"package.{long}.b:x"],
        ["train", f"{long}:x"],
        ["train", long],
        ["probe", "--", sys.executable, f"{long}.py"],
        ["probe", "--", long],
        ["compare", long, long],
        ["train", "demo", "--preset", long],
        ["export", "--profile", long, "--to", "torch"],
    ):
        code, said = invoke(*words)
        assert code in (2, 7), (words[:3], code, said[:300])
        assert said.count("error: ") == 1


@pytest.mark.slow
@pytest.mark.fault("F14", injected="a module of such a name, which Python looks for", outcome="exit 4, one line")
def test_a_module_of_too_long_a_name_is_not_there(folder: Path) -> None:
    code, said = invoke("probe", "--", sys.executable, "-m", "a" * 5000)
    assert code == 4
    assert said.count("error: ") == 1


@pytest.mark.fault("F14", injected="a probe that offers a value no setting can have", outcome="refused, exit 7")
def test_a_probe_cannot_offer_what_no_setting_can_be() -> None:
    text = make_report().to_json()
    assert parse_record(text, ProbeReport, name="probe.json") == make_report()
    with pytest.raises(ProfileError, match=r"target\.optimizer\.implementations"):
        parse_record(text.replace('"for-loop",', '"evil",'), ProbeReport, name="probe.json")


@pytest.mark.fault("F14", injected="durations and sizes beyond every clock and disk", outcome="exit 2")
def test_lengths_beyond_every_clock_are_refused() -> None:
    for parse, text in ((parse_duration, "999999999999999d"), (parse_bytes, "999999999999999TiB")):
        with pytest.raises(UsageError, match="is too l"):
            parse(text)


@pytest.mark.fault("F14", injected="a NUL in a script's command", outcome="exit 2")
def test_a_command_with_a_nul_is_refused() -> None:
    with pytest.raises(AutotuneError, match="NUL"):
        read_script(["python", "train.py", "a\x00b"])
