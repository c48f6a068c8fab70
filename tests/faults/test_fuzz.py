"""Some of what `fuzz.py` tries, and arbitrary records shown by every page: never anything but an answer or one line."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz_targets import TAGGED, TARGETS, FuzzTarget, Trespass, prepared, try_input
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import mutate

from autotune.errors import UsageError

WAYS = {target.name: target for target in TARGETS}
EXAMPLES = {"search": 25, "words": 40, "profile": 60, "run": 60}
"""Inputs of those that cost more than a millisecond; of each other way in there are 120."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    work = tmp_path / "work"
    work.mkdir()
    with prepared(work):
        yield work
    assert sorted(path.name for path in tmp_path.iterdir()) == ["work"]


@pytest.mark.fault("37", injected="good inputs of each kind as they are", outcome="taken")
@pytest.mark.parametrize("name", WAYS)
def test_a_good_input_is_taken(folder: Path, name: str) -> None:
    target = WAYS[name]
    taken = [try_input(target, seed, folder) for seed in target.seeds()]
    assert taken.count("taken") >= len(taken) / 2  # some are of scripts and modules that are not there


@pytest.mark.fault("37", injected="mutated profiles, presets, probes, runs and so on", outcome="one line, or used")
@pytest.mark.fault("F14", injected="25 to 120 mutated inputs for each of eleven ways in", outcome="one line or used")
@pytest.mark.parametrize("name", WAYS)
def test_a_bad_input_is_refused_in_a_line(folder: Path, name: str) -> None:
    target = WAYS[name]
    seeds = target.seeds()

    @settings(max_examples=EXAMPLES.get(name, 120), suppress_health_check=list(HealthCheck))
    @given(st.integers(0, len(seeds) - 1), st.integers(0, 2**32))
    def try_mutated(which: int, number: int) -> None:
        data = mutate(seeds[which], random.Random(number), is_json=target.is_json, tag=name in TAGGED)
        try_input(target, data, folder)

    try_mutated()


@pytest.mark.parametrize(
    ("act", "part"),
    [
        (lambda folder: (folder.parent / "pwned").write_text("x"), "open"),
        (lambda folder: (folder.parent / "pwned").mkdir(), "os.mkdir"),
        (lambda folder: __import__("os").system("true"), "os.system"),
        (lambda folder: __import__("subprocess").run(["true"], check=False), "subprocess.Popen"),
        (lambda folder: exec(compile("1", str(folder / "train.py"), "exec")), "code of the input"),
    ],
)
def test_the_fuzzer_sees_what_no_data_may_have_done(folder: Path, act: object, part: str) -> None:
    target = FuzzTarget("evil", lambda _data, folder: act(folder), lambda: [])  # type: ignore[operator]
    with pytest.raises(Trespass, match=part):
        try_input(target, b"", folder)


def test_the_fuzzer_sees_what_is_no_clear_line(folder: Path) -> None:
    def fail(_data: bytes, _folder: Path) -> None:
        raise ValueError("a bug")

    def print_escape(_data: bytes, _folder: Path) -> None:
        print("\x1b[2J")

    def refuse(_data: bytes, _folder: Path) -> None:
        raise UsageError("")

    for run, kind in ((fail, ValueError), (print_escape, AssertionError), (refuse, AssertionError)):
        with pytest.raises(kind):
            try_input(FuzzTarget("bad", run, lambda: []), b"", folder)
