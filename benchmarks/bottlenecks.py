"""Does the probe find the limit that was planted? One table, right or wrong, with the time each probe took.

python benchmarks/bottlenecks.py                 every planted training once
python benchmarks/bottlenecks.py --repeats 5     five times each
python benchmarks/bottlenecks.py --json FILE     the same as data
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "probe"))

from planted import EXPECTED  # type: ignore[import-not-found]  # noqa: E402

from autotune import run_probe  # noqa: E402


def probe_planted(name: str) -> dict[str, object]:
    """Return what the probe says of one planted training."""
    began = time.monotonic()
    report = run_probe(f"tests/probe/planted.py:{name}", folder=ROOT)
    expected, troubles = EXPECTED[name], [trouble.name for trouble in report.troubles]
    found = report.verdict.limit
    return {
        "target": name,
        "expected": expected,
        "limit": found,
        "right": expected in (found, *troubles),
        "sentence": report.verdict.sentence,
        "speedup_ceiling": report.verdict.speedup_ceiling,
        "troubles": troubles,
        "advice": [item.knob for item in report.advice],
        "seconds": time.monotonic() - began,
    }


def main() -> int:
    """Probe every planted training and print the table; return how many verdicts were wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", nargs="*", choices=sorted(EXPECTED), default=sorted(EXPECTED))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for name in arguments.only:
        for _ in range(arguments.repeats):
            rows.append(probe_planted(name))
            row = rows[-1]
            verdict = "right" if row["right"] else "WRONG"
            print(f"{name:18} {row['expected']!s:11} {verdict}  {row['seconds']:5.1f} s  {row['sentence']}", flush=True)
    counts = Counter(bool(row["right"]) for row in rows)
    print(f"{counts[True]} of {len(rows)} right")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    return counts[False]


if __name__ == "__main__":
    sys.exit(main())
