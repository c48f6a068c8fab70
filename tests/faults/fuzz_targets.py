"""What is fuzzed: everything that reads what somebody else may have written, or a user mistyped.

Of any input comes something usable or an AutotuneError of one line: no other exception, no wait, nothing printed that a
terminal obeys, no file outside of the folder, no process, no connection, no code of the input.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import emit_records
import page_records
import typer
from compared_runs import make_log, make_run_summary, plant_run
from record_factory import make_state, make_target, read_drift_limits

from autotune.cli import app
from autotune.cli.pages.answer import print_answer
from autotune.cli.pages.comparison import print_comparison
from autotune.cli.pages.probe import print_machine, print_report
from autotune.cli.pages.report import render_search
from autotune.cli.view import terminal
from autotune.emit.export import EXPORTERS, export_profile
from autotune.errors import AutotuneError
from autotune.knobs import Facts
from autotune.presets import find_preset
from autotune.records import Candidate, Evidence, NotTested, Profile, Record, parse_record, read_record
from autotune.records.finals import FinalsRecord, LookTaken, Round
from autotune.records.probe import MachineReport, ProbeReport
from autotune.records.profile import Confirmation, MachineNoise
from autotune.records.reading import is_preset
from autotune.records.secrets import mask_words
from autotune.records.trial import Target
from autotune.search.answer.notes import describe_left_out
from autotune.search.store.folder import SearchFolder, check_output, find_search_folder
from autotune.space import build_space
from autotune.targets.check import check_target
from autotune.targets.launch.command import find_launch
from autotune.targets.metric import read_metrics
from autotune.targets.resolve import resolve_target
from autotune.targets.script import own_values, read_script, render_command, script_label
from autotune.targets.source.fingerprint import fingerprint_target
from autotune.targets.source.neighbours import find_trainings
from autotune.targets.user_knob import read_knob, write_knob
from autotune.targets.workload import check_workload
from autotune.train.runs.compare import compare_runs
from autotune.train.script.progress import find_failure, read_progress
from autotune.train.settings import choice as settings
from autotune.train.settings import differences
from autotune.train.settings import presets as preset_settings
from autotune.train.settings.candidate import take_candidate
from autotune.train.settings.presets import fit_preset
from autotune.train.settings.target import resolve_training_target
from autotune.units import parse_amount, parse_bytes, parse_duration

search_command, train_command, probe_stage, search_stage = (
    importlib.import_module(f"autotune.{name}")  # some share their names with what they hold
    for name in ("cli.search", "cli.train", "probe.run", "search.run")
)

TESTS = Path(__file__).parents[1]


def _list_records(kind: type[Record]) -> list[type[Record]]:
    return [one for own in kind.__subclasses__() for one in (own, *_list_records(own))]


RECORDS = sorted(_list_records(Record), key=lambda kind: kind.__name__)

CASE_SECONDS = 20.0
"""Longest that one input may take: a hang is a fault, a busy machine is none."""

_LONGEST_MESSAGE = 4000
_PYTHON = """import torch

class Toy:
    def build_model(self): ...
    def build_optimizer(self, model): ...
    def train_dataset(self): ...
    def compute_loss(self, model, batch): ...

workload = Toy()
"""


class Trespass(BaseException):
    """The input had something done that no data may have done."""


@dataclass(frozen=True)
class FuzzTarget:
    """One way in.

    Attributes:
        name: of the way.
        run: reads an input in a folder, which is the working folder.
        seeds: inputs that are good, to begin with.
        is_json: they are JSON, of which parts are exchanged.
    """

    name: str
    run: Callable[[bytes, Path], None]
    seeds: Callable[[], list[bytes]]
    is_json: bool = False


def try_input(target: FuzzTarget, data: bytes, folder: Path) -> Literal["taken", "refused"]:
    """Return what became of an input.

    Raises:
        BaseException: anything but an AutotuneError of one line.
    """
    out, err = io.StringIO(), io.StringIO()
    try:
        with _limited(), _guarded(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            target.run(data, folder)
    except AutotuneError as error:
        _check_message(error)
        return "refused"
    finally:
        if target.name != "words":  # there the frame around a mistyped option is another library's
            _check_printed(out.getvalue() + err.getvalue())
    return "taken"


def _check_message(error: AutotuneError) -> None:
    for text in (error.message, error.hint):
        shown = terminal.printable(terminal.shorten(text))
        assert "\n" not in shown, f"more than one line: {text[:200]!r}"
        assert len(shown) < _LONGEST_MESSAGE
    assert error.message


def _check_printed(text: str) -> None:
    bad = {character for character in text if not character.isprintable() and character != "\n"}
    assert not bad, f"printed: {bad}"
    assert "Traceback" not in text


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def end(_number: int, _frame: object) -> None:
        raise Trespass(f"it took longer than {CASE_SECONDS:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, CASE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


_guarded_folder: list[str] = []
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_STARTING = ("subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.kill")
_FORBIDDEN = (*_STARTING, "socket.connect", "socket.bind", "pickle.find_class")
_CHANGING = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.truncate")


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if not _guarded_folder:
        return
    if event.startswith(_FORBIDDEN):
        raise Trespass(f"{event} {arguments!r}")
    if event == "exec" and str(getattr(arguments[0], "co_filename", "")).startswith(_guarded_folder[0]):
        raise Trespass(f"code of the input: {arguments!r}")
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING:
        _require_inside(event, arguments[0])
    if event in _CHANGING:
        _require_inside(event, arguments[1] if event == "os.symlink" else arguments[0])


def _require_inside(event: str, path: object) -> None:
    if isinstance(path, int):
        return
    place = os.path.abspath(os.fsdecode(path))  # type: ignore[arg-type]
    if place != os.devnull and not place.startswith(_guarded_folder[0]) and "__pycache__" not in place:
        raise Trespass(f"{event} {place}")


_is_watching: list[bool] = []


@contextlib.contextmanager
def _guarded(folder: Path) -> Iterator[None]:
    if not _is_watching:  # such a hook cannot be taken off again
        sys.addaudithook(_watch)
        _is_watching.append(True)
    _guarded_folder.append(os.path.realpath(folder))
    try:
        yield
    finally:
        _guarded_folder.pop()


@contextlib.contextmanager
def prepared(folder: Path) -> Iterator[None]:
    """Work in a folder on a machine that is read once; nothing that would start a process does."""
    hardware, software = emit_records.make_hardware(), emit_records.make_software()
    before = os.getcwd()
    with contextlib.ExitStack() as stack:
        for module in (differences, settings, preset_settings):
            stack.enter_context(mock.patch.object(module, "read_hardware", return_value=hardware))
        for module in (differences, preset_settings):
            stack.enter_context(mock.patch.object(module, "read_software", return_value=software))
        for stage, name, answer in (
            (probe_stage, "run_machine_probe", page_records.make_machine()),
            (probe_stage, "run_probe", page_records.make_report()),
            (search_stage, "run_search", emit_records.make_profile()),
        ):
            stack.enter_context(mock.patch.object(stage, name, return_value=answer))
        stack.enter_context(mock.patch.multiple(train_command, train_workload=_end, train_in_child=_end))
        stack.enter_context(mock.patch.object(train_command, "train_script_target", _end))
        stack.enter_context(mock.patch.object(sys, "argv", ["autotune"]))
        # Whatever dead processes have left in the real one would be swept, which is no trespass.
        stack.enter_context(mock.patch.object(tempfile, "tempdir", str(folder)))
        os.chdir(folder)
        (folder / "train.py").write_text(_PYTHON)
        try:
            yield
        finally:
            os.chdir(before)


def _end(*_arguments: object, **_options: object) -> None:
    raise typer.Exit(0)


# Profiles


class _Toy:
    baseline = emit_records.BASELINE
    knobs = {"width": (8, 16)}
    width = 8

    def build_model(self) -> Any: ...

    def build_optimizer(self, model: Any) -> Any: ...

    def train_dataset(self) -> Any: ...

    def compute_loss(self, model: Any, batch: Any) -> Any: ...


def _read_profile(data: bytes, folder: Path) -> None:
    path = folder / "best.json"
    path.write_bytes(data)
    is_preset(path)
    with contextlib.suppress(AutotuneError):
        check_output(path, "train.py:workload", force=False)
    use_profile(Profile.load(path), folder)


def use_profile(profile: Profile, folder: Path) -> None:
    """Do with a profile what every command does.

    Raises:
        AutotuneError: it does not fit.
    """
    print_answer(profile, folder / "best.json")
    for name in EXPORTERS:
        export = export_profile(profile, name, found=profile.hardware.host_allocators)
        shown = "\n".join([export.text, *export.aside])
        assert all(character.isprintable() or character == "\n" for character in shown)
    differences.find_differences(profile, target_fingerprint="m-0123456789ab", data_fingerprint="1000:0123456789ab")
    assert parse_record(profile.to_json(), Profile, name="it") == profile
    for fingerprint in ("m-0123456789ab", profile.target.fingerprint):
        loaded = check_workload(_Toy(), label="train.py:workload", fingerprint=fingerprint)
        with contextlib.suppress(AutotuneError):
            chosen = settings.choose_settings(loaded, **_no_choice(profile), data_fingerprint=None)
            loaded.set_knobs(chosen.config)
            assert loaded.workload.width in (8, 16)  # type: ignore[attr-defined]
            factor = chosen.config.effective_batch_size / chosen.baseline_config.effective_batch_size
            assert factor in (1.0, 2.0, 4.0)
            assert factor > 1.0 or chosen.config.learning_rate_scale == chosen.baseline_config.learning_rate_scale
    with contextlib.suppress(AutotuneError):
        settings.choose_script_settings(_make_target(folder, profile.target.label), **_no_choice(profile))
    with contextlib.suppress(AutotuneError):
        take_candidate(profile, "best.json", terminal.warn)


def _no_choice(profile: Profile) -> dict[str, Any]:
    return {"profile": profile, "preset": None, "find_facts": emit_records.make_facts, "note": terminal.warn}


def _make_target(folder: Path, label: str) -> Target:
    words = (sys.executable, "train.py", "--width", "{width:8}", "--bs", "{micro_batch_size:32}")
    return Target(spec=label, folder=str(folder), script=read_script(words, knobs=["width=8,16"]))


def _profiles() -> list[bytes]:
    baseline = emit_records.BASELINE.replace(user_knobs={"width": 8})
    tuned = emit_records.TUNED.replace(user_knobs={"width": 16})
    confirmation = Confirmation(
        pairs_planned=4,
        log_ratios=(0.1, 0.2),
        candidate_first=(True, False),
        interval=emit_records.make_interval(),
        hodges_lehmann=1.16,
        expected_speedup=1.3,
        shrunk_speedup=1.2,
        smallest_detectable=1.05,
        wanted_speedup=1.1,
        budget_needed_seconds=600.0,
        extra_seconds_needed=60.0,
    )
    evidence = emit_records.make_profile().evidence.replace(
        confirmation=confirmation,
        noise=MachineNoise(launch_sd=0.03, degrees_of_freedom=2.0, block_sd=0.1, baseline_range=1.2),
        flops_per_sample=1e6,
        peak_flops_per_second=1e9,
        measured_fraction=0.5,
        drift_fraction=0.1,
    )
    candidate = Candidate(config=tuned, speedup_estimate=1.2, pairs=3, passed_checks=True, reason="too few pairs")
    larger = tuned.replace(micro_batch_size=64, learning_rate_scale=2.0)
    untested = NotTested(outcomes={"crashed": 2}, settings=("num_workers",), settings_known=3)
    made = [
        {"config": tuned, "evidence": evidence},
        {"config": baseline, "verdict": "inconclusive", "candidate": candidate, "evidence": evidence},
        {"config": larger, "allowed": ("batch",), "learning_rate_rule": "linear"},
        {"config": baseline, "verdict": "not-tested", "evidence": Evidence(not_tested=untested)},
    ]
    profiles = [emit_records.make_profile(**{"baseline_config": baseline, **changes}) for changes in made]
    return [profile.to_json().encode() for profile in profiles] + _stored("best.json")


def _stored(name: str) -> list[bytes]:
    """Return the files of a name that real searches of this version wrote, as far as the tests keep any."""
    return [path.read_bytes() for path in sorted((TESTS / "search" / "data").rglob(name))]


# Presets, probes and all other records


def _read_preset(data: bytes, folder: Path) -> None:
    path = folder / "mine.json"
    path.write_bytes(data)
    is_preset(path)
    preset, facts = find_preset("mine.json"), emit_records.make_facts()
    fitted = fit_preset(preset, facts)
    space = build_space(Facts(target=facts, hardware=emit_records.make_hardware())).admit(preset.settings)
    for sentence in (*fitted.left_out, *describe_left_out(preset, space)):
        terminal.warn(sentence)
    assert fitted.config.effective_batch_size == facts.baseline.effective_batch_size


def _presets() -> list[bytes]:
    settings = {"precision": "bf16", "num_workers": 4, "micro_batch_size": 16, "user_knobs.width": 16}
    own = {"schema_version": 1, "name": "mine", "description": "my recipe", "settings": settings}
    shipped = sorted((TESTS.parent / "profiles").glob("*.json"))
    return [json.dumps(own, indent=2).encode(), *(path.read_bytes() for path in shipped)]


def _read_probe(data: bytes, folder: Path) -> None:
    (folder / "probe.json").write_bytes(data)
    if b'"target"' in data:
        report = read_record(folder / "probe.json", ProbeReport)
        print_report(report)
        space = build_space(Facts(target=report.target, hardware=report.hardware))
        space.complete({name: space.choices[name][-1] for name in space.free_knobs})
    else:
        print_machine(read_record(folder / "probe.json", MachineReport))


def _probes() -> list[bytes]:
    made = (page_records.make_report(), page_records.make_cpu_report(), page_records.make_machine())
    return [record.to_json().encode() for record in made] + _stored("probe.json")


def _read_any(data: bytes, _folder: Path) -> None:
    kind = RECORDS[data[0] % len(RECORDS)] if data else RECORDS[0]
    record = parse_record(data[1:].decode("utf-8", "replace"), kind, name="it")
    assert parse_record(record.to_json(), kind, name="it") == record


def _records() -> list[bytes]:
    trial = emit_records.make_trial(3)
    facts = emit_records.make_facts()
    made = (trial, trial.spec, facts, facts.data, facts.model, emit_records.make_measurement(), emit_records.TUNED)
    return [bytes([RECORDS.index(type(record))]) + record.to_json().encode() for record in made]


# Folders of searches and of runs


_SEARCH_FILES = ("search.json", "finals.json", "probe.json", "best.json", "trials/0001/result.json")


def _read_search(data: bytes, folder: Path) -> None:
    place = folder / ".autotune" / "toy-1"
    if not place.exists():
        _plant_search(folder, place)
    which = _SEARCH_FILES[data[0] % len(_SEARCH_FILES)] if data else _SEARCH_FILES[0]
    kept = (place / which).read_bytes()
    (place / which).write_bytes(data[1:])
    try:
        _use_search(folder, SearchFolder(place))
    finally:
        (place / which).write_bytes(kept)


def _use_search(folder: Path, search: SearchFolder) -> None:
    find_search_folder(folder)
    find_search_folder(folder, "train.py:workload")
    with contextlib.suppress(AutotuneError):
        resolve_training_target(None, folder)
    search.next_number()
    search.count_interrupted()
    with contextlib.suppress(AutotuneError):
        search.read_finals()
    page = render_search(search.path)
    assert page.lower().count("<script") == 1  # the page's own, which sorts
    assert "<img" not in page.lower()
    search.read_state()


def _plant_search(folder: Path, place: Path) -> None:
    (place / "trials" / "0001").mkdir(parents=True)
    (folder / ".autotune").chmod(0o700)
    for name, content in zip(_SEARCH_FILES, (seed[1:] for seed in _searches()), strict=False):
        (place / name).write_bytes(content)


def _searches() -> list[bytes]:
    state = make_state(target=make_target("train.py:workload", "."))
    look = LookTaken(candidate=emit_records.TUNED, share=0.5, rounds=(Round(candidate=2, baseline=3),))
    made = (state, FinalsRecord(looks=(look,)), emit_records.make_report(), emit_records.make_profile())
    trial = emit_records.make_trial(1)
    seeds = [bytes([index]) + record.to_json().encode() for index, record in enumerate((*made, trial))]
    stored = [(index, Path(name).name) for index, name in enumerate(_SEARCH_FILES)]
    return seeds + [bytes([index]) + content for index, name in stored for content in _stored(name)]


_RUN_FILES = ("run.json", "summary.json", "metrics.jsonl", "progress-0.json")


def _read_run(data: bytes, folder: Path) -> None:
    for name in ("a", "b"):
        if not (folder / name).exists():
            plant_run(folder / name)
    which = _RUN_FILES[data[0] % len(_RUN_FILES)] if data else _RUN_FILES[0]
    (folder / "b" / which).write_bytes(data[1:])
    try:
        find_failure(read_progress(folder / "b"))
        print_comparison(compare_runs(Path("a"), Path("b")))
    finally:
        shutil.rmtree(folder / "b")


def _runs() -> list[bytes]:
    lines = "".join(json.dumps(line) + "\n" for line in make_log(60))
    with tempfile.TemporaryDirectory() as scratch:
        run = plant_run(Path(scratch) / "a")
        plan, summary = (run / "run.json").read_bytes(), make_run_summary(run).to_json().encode()
    progress = json.dumps({"rank": 0, "steps": 3, "failure": {"cause": "oom-host", "detail": "it", "at": 1.0}}).encode()
    return [bytes([index]) + content for index, content in enumerate((plan, summary, lines.encode(), progress))]


# Settings, texts, commands


def _read_settings(data: bytes, folder: Path) -> None:
    name = ("pyproject.toml", "autotune.toml")[data[0] % 2] if data else "pyproject.toml"
    (folder / name).write_bytes(data[1:])
    try:
        given: dict[str, str | None] = {"budget": None, "memory_limit": None, "out": None}
        search_command.read_options(given, seed=0, resume=False, force=False)
        resolve_target(None, folder=folder)
    finally:
        (folder / name).unlink()


def _settings() -> list[bytes]:
    own = (
        'target = "train.py:workload"\nbudget = "20m"\nmax_drift = ["0.5%", "accuracy:0.1pp"]\n'
        'memory_limit = "16GiB"\nout = "best.json"\n'
    )
    command = 'command = ["python", "train.py", "--bs", "{micro_batch_size:8}"]\n'
    text = 'command = "python train.py --token abc"\n'
    tables = [f"[tool.autotune]\n{body}" for body in (own, command, text)] + ["tool = 3\n", "[tool.other]\nx = 1\n"]
    return [b"\0" + table.encode() for table in tables] + [b"\1" + own.encode()]


_PARSERS: tuple[Callable[[str], object], ...] = (
    parse_duration,
    parse_bytes,
    lambda text: parse_amount(text, counts=("epochs", "samples")),
    lambda text: read_drift_limits(text.split("\n")),
    lambda text: read_knob(write_knob(read_knob(text))),
    lambda text: read_metrics(regexes=text.split("\n"), directions=["maximize"]),
    lambda text: read_metrics(keys=text.split("\n"), directions=text.split("\n")[:2]),
    search_command.read_planned_run,
    lambda text: check_target(Target(spec=text, folder=".")),
    lambda text: resolve_target(text, folder=Path.cwd()),
    find_preset,
)
_TEXTS = ("1h30m", "16GiB", "30epochs", "loss:1%\naccuracy:0.1pp", r"lr=1e-3,2\,3:semantic", "val_acc=([0-9.]+)", "acc")


def _read_text(data: bytes, _folder: Path) -> None:
    _PARSERS[data[0] % len(_PARSERS) if data else 0](data[1:].decode("utf-8", "surrogateescape"))


def _texts() -> list[bytes]:
    more = ("maximize", "8h", "train.py:workload", "package.module:workload", "balanced")
    return [bytes([index]) + text.encode() for index, text in enumerate((*_TEXTS[:6], *more))]


def _read_command(data: bytes, folder: Path) -> None:
    """Read groups of words: the command, knobs, expressions, keys, directions."""
    groups = [group.split(b"\0") for group in data.split(b"\x1e")]
    words, knobs, regexes, keys, directions = (
        [os.fsdecode(word) for word in group if word] for group in (*groups, *[[]] * 5)[:5]
    )
    script = read_script(words, knobs=knobs, metric_regexes=regexes, metric_keys=keys, directions=directions)
    assert mask_words(mask_words(script.command)) == mask_words(script.command)
    target = Target(spec=script_label(script.command), folder=str(folder), script=script)
    assert parse_record(target.to_json(), Target, name="it").model_dump() == target.model_dump()
    find_launch(render_command(script, own_values(script)), folder=folder)
    fingerprint_target(target)
    resolve_target(script, folder=folder)


def _commands() -> list[bytes]:
    commands = (
        ["python", "train.py", "--bs", "{micro_batch_size:64}", "--lr={lr}", "--token", "abc"],
        ["python", "-u", "-m", "train", "--accum", "{gradient_accumulation_steps}"],
        ["torchrun", "--nproc-per-node", "2", "train.py", "https://me:pw@host/x?api_key=1"],
        [sys.executable, "-X", "dev", "train.py", "{{not}}", "${HOME}", '{"a": 1}'],
    )
    more = b"\x1e".join((b"lr=0.1,0.2:semantic", b"val_acc=([0-9.]+)", b"loss", b"maximize\0minimize"))
    first, *others = (os.fsencode("\0".join(words)) for words in commands)
    return [first + b"\x1e" + more, *others]


def _read_words(data: bytes, _folder: Path) -> None:
    words = [os.fsdecode(word) for word in data.split(b"\0") if b"-selftest" not in word]
    with mock.patch.object(sys, "argv", ["autotune", *words]), contextlib.suppress(SystemExit):
        app([word for word in words if word != "selftest"], prog_name="autotune")


def _word_lists() -> list[bytes]:
    lines = (
        "search --budget 20m --max-drift 0.5% --memory-limit 8GiB --seed 3 demo",
        "search --tune-batch-size --lr-scaling sqrt --preset balanced train.py:workload",
        "search --knob lr=1,2 --metric-regex a=(.*) --direction maximize -- python train.py --lr {lr}",
        "train --profile best.json --steps 3 --max-time 3h demo",
        "train --preset balanced --json -- python train.py",
        "probe --json demo",
        "compare a b --json",
        "export --profile best.json --to torch",
        "report --out page.html --force",
        "--version",
    )
    return [line.replace(" ", "\0").encode() for line in lines]


def _read_source(data: bytes, folder: Path) -> None:
    (folder / "source.py").write_bytes(data)
    find_trainings(folder)
    for spec in ("source.py:workload", "source:workload.part"):
        target = Target(spec=spec, folder=str(folder))
        fingerprint_target(target)
        check_target(target)


def _sources() -> list[bytes]:
    return [_PYTHON.encode(), b"from train import *\nimport package.module as it\nif True:\n    workload = it.make()\n"]


TARGETS = (
    FuzzTarget("profile", _read_profile, _profiles, is_json=True),
    FuzzTarget("preset", _read_preset, _presets, is_json=True),
    FuzzTarget("probe", _read_probe, _probes, is_json=True),
    FuzzTarget("record", _read_any, _records, is_json=True),
    FuzzTarget("search", _read_search, _searches, is_json=True),
    FuzzTarget("run", _read_run, _runs, is_json=True),
    FuzzTarget("settings", _read_settings, _settings),
    FuzzTarget("text", _read_text, _texts),
    FuzzTarget("command", _read_command, _commands),
    FuzzTarget("words", _read_words, _word_lists),
    FuzzTarget("source", _read_source, _sources),
)

TAGGED = ("record", "search", "run", "settings", "text")
"""Ways in whose inputs begin with a byte that says what the rest is."""
