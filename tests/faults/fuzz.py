"""Fuzz everything that reads what others wrote: so many inputs for each way in, guided by the code they reach.

    python -m pip install atheris
    python tests/faults/fuzz.py                     10,000 inputs for each of the ways in: a quarter of an hour
    python tests/faults/fuzz.py --cases 100000 --only profile --only search

Without atheris (there is none for this Python) the same inputs are drawn blindly. Ends with 1 if anything but a usable
record or an error of one line came of an input; such inputs are in fuzz-found/.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

_SEED = 20261123
_LONGEST_BYTES = 262_144
_FOUND = Path("fuzz-found")
_NOTE_EVERY = 250
_KEPT_OF_A_KIND = 3


def main() -> int:
    """Fuzz each way in a process of its own, print a line for each, and return the exit status."""
    options = _read_options()
    if options.one:
        _fuzz_one(options.one, options.cases, Path(options.notes))
        return 0
    from fuzz_targets import TARGETS

    names = options.only or [target.name for target in TARGETS]
    print(f"{'way in':<10}{'inputs':>10}{'taken':>10}{'refused':>10}{'faults':>8}{'seconds':>9}  guided")
    notes = [_run_one(name, options.cases) for name in names]
    total = {key: sum(note[key] for note in notes) for key in ("cases", "taken", "refused", "faults")}
    print(f"{'all':<10}{total['cases']:>10,}{total['taken']:>10,}{total['refused']:>10,}{total['faults']:>8,}")
    for note in notes:
        for kind, count in note["kinds"].items():
            print(f"{note['name']}: {count} times {kind}")
    return 1 if total["faults"] else 0


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="inputs for each way in")
    parser.add_argument("--only", action="append", help="a way in; may be repeated")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--notes", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def _run_one(name: str, cases: int) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="autotune-fuzz-") as scratch:
        notes, log = Path(scratch) / "notes.json", Path(scratch) / "log.txt"
        command = [sys.executable, __file__, "--one", name, "--cases", str(cases), "--notes", str(notes)]
        with log.open("wb") as file:
            done = subprocess.run(command, stdout=file, stderr=file, check=False)
        if not notes.exists():
            raise SystemExit(f"{name}: {log.read_text(errors='replace')[-3000:]}")
        note: dict[str, Any] = json.loads(notes.read_text())
        if note["cases"] < cases:  # the process died
            note["faults"] += 1
            note["kinds"][f"died with {done.returncode}: {log.read_text(errors='replace')[-800:]}"] = 1
    seconds = time.monotonic() - began
    print(
        f"{name:<10}{note['cases']:>10,}{note['taken']:>10,}{note['refused']:>10,}{note['faults']:>8,}"
        f"{seconds:>9.0f}  {'yes' if note['guided'] else 'no'}",
        flush=True,
    )
    return note


def _fuzz_one(name: str, cases: int, notes: Path) -> None:
    guided = importlib.util.find_spec("atheris") is not None
    if guided:
        import atheris  # type: ignore[import-not-found]

        with atheris.instrument_imports(include=["autotune"]):
            import fuzz_targets
    else:
        import fuzz_targets
    from mutations import mutate

    target = next(one for one in fuzz_targets.TARGETS if one.name == name)
    tagged = name in fuzz_targets.TAGGED
    with tempfile.TemporaryDirectory(prefix="autotune-fuzz-") as scratch, contextlib.ExitStack() as stack:
        corpus, folder = Path(scratch) / "corpus", Path(scratch) / "work"
        corpus.mkdir()
        folder.mkdir()
        seeds = target.seeds()
        for number, seed in enumerate(seeds):
            (corpus / f"{number:03d}").write_bytes(seed)
        found = _FOUND.resolve()
        stack.enter_context(fuzz_targets.prepared(folder))
        counts = _Counts(name, target, folder, notes, found, guided=guided)
        if not guided:
            generator = random.Random(_SEED)
            for _ in range(cases):
                counts.try_one(mutate(generator.choice(seeds), generator, is_json=target.is_json, tag=tagged))
            counts.note()
            return

        def change(data: bytes, max_size: int, seed: int) -> bytes:
            generator = random.Random(seed)
            if generator.random() < 0.2:
                mutated: bytes = atheris.Mutate(data, max_size)
                return mutated
            if generator.random() < 0.6:  # what was found is damaged more and more: most of it is refused at once
                data = generator.choice(seeds)
            return mutate(data, generator, is_json=target.is_json, tag=tagged)[:max_size]

        counts.last = cases
        words = [f"-runs={cases}", f"-seed={_SEED}", f"-max_len={_LONGEST_BYTES}", "-len_control=0", "-timeout=60"]
        atheris.Setup([sys.argv[0], *words, "-rss_limit_mb=6000", str(corpus)], counts.try_one, custom_mutator=change)
        atheris.Fuzz()


class _Counts:
    """What became of the inputs, written down now and then: the fuzzer ends its process by itself."""

    def __init__(self, name: str, target: Any, folder: Path, notes: Path, found: Path, *, guided: bool) -> None:
        self._name, self._target, self._folder = name, target, folder
        self._notes, self._found, self._guided = notes, found, guided
        self._counts: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()
        self.last = 0
        self.note()

    def try_one(self, data: bytes) -> None:
        """Try an input, and note what came of it."""
        from fuzz_targets import try_input

        try:
            self._counts[try_input(self._target, data, self._folder)] += 1
        except (KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:
            self._counts["faults"] += 1
            self._keep(error, data)
        self._counts["cases"] += 1
        if self._counts["cases"] % _NOTE_EVERY == 0 or self._counts["cases"] >= self.last > 0:
            self.note()

    def note(self) -> None:
        """Write the counts."""
        counts = {key: self._counts[key] for key in ("cases", "taken", "refused", "faults")}
        more = {"name": self._name, "guided": self._guided, "kinds": dict(self._kinds)}
        self._notes.write_text(json.dumps(counts | more))

    def _keep(self, error: BaseException, data: bytes) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "/autotune/" in frame.filename] or list(frames)
        place = f"{Path(own[-1].filename).name}:{own[-1].lineno}"
        kind = f"{type(error).__name__} at {place}: {str(error)[:160]}"
        key = f"{type(error).__name__} at {place}"
        same = next((known for known in self._kinds if known.startswith(key)), kind)
        self._kinds[same] += 1
        if self._kinds[same] <= _KEPT_OF_A_KIND:
            self._found.mkdir(exist_ok=True)
            file = self._found / f"{self._name}-{key.replace(' at ', '-').replace(':', '-')}-{self._kinds[same]}"
            file.write_bytes(data)
            file.with_name(f"{file.name}.txt").write_text("".join(traceback.format_exception(error)))


if __name__ == "__main__":
    for name in (".", "faults", "emit", "probe", "cli", "train"):
        sys.path.append(str(Path(__file__).parents[1] / name))
    sys.exit(main())
