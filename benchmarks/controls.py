"""Run every control of tests/drift through the drift gate, and print a table of what was caught and what passed.

    python benchmarks/controls.py [--repeats 20] [--only NAME ...] [--scripts] [--calibrate] [--device cpu]

Each repeat has another seed: other weights, another order, other masks. A control with a mistake must be caught, one
without must pass; exit status 1 when one was not. `--scripts` adds those that run as scripts, a process for each trial.
`--calibrate` prints what low precision does to right gradients instead: the noise and bias that the limits must let
pass. With 20 repeats the table takes about half an hour on one CPU core; let nothing else run beside it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from autotune.drift.gate.screen import CLOSER_WINDOWS
from autotune.records import TrainConfig
from autotune.records.measurement import Interval
from autotune.records.quality import GradientEquivalence
from autotune.records.trial import GradientPlan

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "drift"))

from controls import CONTROLS, Control  # type: ignore[attr-defined, unused-ignore]
from gate_runs import GateRuns, OpenTarget, Verdict, open_runner  # type: ignore[import-not-found]
from script_controls import SCRIPT_CONTROLS  # type: ignore[import-not-found]

CALIBRATED = {
    "convolutions, BatchNorm": "controls.py:images_batch_norm",
    "convolutions, GroupNorm": "controls.py:images",
    "transformer": "controls.py:sequences",
}
CALIBRATION_PLANS = tuple(GradientPlan(windows=windows, later_steps=100) for windows in (16, 24, CLOSER_WINDOWS))
LOW_PRECISIONS = ("bf16", "fp16")
ALONE = {"cpu": {"CUDA_VISIBLE_DEVICES": ""}, "cuda": {}}
"""Environment in which a trial finds no other device."""


@dataclass
class Tally:
    """The verdicts on one control.

    Attributes:
        control: which.
        verdicts: by seed.
    """

    control: Control
    verdicts: dict[int, Verdict] = field(default_factory=dict)

    def misses(self) -> dict[int, Verdict]:
        """Return the verdicts that are wrong: a mistake not caught, or a right training not passed."""
        return {seed: verdict for seed, verdict in self.verdicts.items() if not self._is_right(verdict)}

    def describe(self) -> str:
        """Return how many of the verdicts are right, and by which tests."""
        right = len(self.verdicts) - len(self.misses())
        word = "caught" if self.control.caught_by else "passed"
        return f"{word} {right} of {len(self.verdicts)}{self._describe_tests()}"

    def row(self) -> str:
        """Return the control's row of the table."""
        seconds = statistics.median(verdict.seconds for verdict in self.verdicts.values())
        expected = f"caught by {self.control.caught_by}" if self.control.caught_by else "passes"
        return f"| {self.control.name} | {expected} | {self.describe()} | {seconds:.1f} | {len(self.verdicts)} |"

    def _is_right(self, verdict: Verdict) -> bool:
        return bool(verdict.caught_by) if self.control.caught_by else bool(verdict.passed)

    def _describe_tests(self) -> str:
        if self.control.caught_by:
            found = Counter(test for verdict in self.verdicts.values() for test in verdict.caught_by)
            return "".join(f", {test} {count}" for test, count in found.most_common())
        trained = sum(any(is_training(check.test) for check in one.checks) for one in self.verdicts.values())
        refused = sum(bool(one.caught_by) for one in self.verdicts.values())
        notes = [f"{trained} by trainings" if trained else "", f"{refused} refused" if refused else ""]
        return "".join(f", {note}" for note in notes if note)


def is_training(test: str) -> bool:
    """Return whether a test trains with several seeds."""
    return test in ("paired-losses", "exact-losses", "metric", "samples-to-loss")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=20, help="seeds for each control")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="controls; all without any")
    parser.add_argument("--scripts", action="store_true", help="those that run as scripts too")
    parser.add_argument("--calibrate", action="store_true", help="print what low precision does to right gradients")
    parser.add_argument("--device", choices=sorted(ALONE), default="cpu")
    options = parser.parse_args()
    if options.calibrate:
        calibrate(options.repeats, device=options.device)
        return
    every = [*CONTROLS, *(SCRIPT_CONTROLS if options.scripts else ())]
    unknown = set(options.only) - {control.name for control in every}
    if unknown:
        parser.error(f"there is no control {', '.join(sorted(unknown))}")
    chosen = [control for control in every if control.name in options.only or not options.only]
    sys.exit(1 if print_verdicts(chosen, options.repeats, device=options.device) else 0)


def print_verdicts(controls: Sequence[Control], repeats: int, *, device: str) -> int:
    """Print a row for each control and every wrong verdict in full; return the number of these."""
    print("| control | expected | verdicts | median s | n |", flush=True)
    print("| --- | --- | --- | ---: | ---: |", flush=True)
    tallies = []
    for _, group in groupby(sorted(controls, key=target_of), key=target_of):
        for tally in judge_target(list(group), repeats, device=device):
            print(tally.row(), flush=True)
            tallies.append(tally)
    misses = [(tally.control, seed, verdict) for tally in tallies for seed, verdict in tally.misses().items()]
    for control, seed, verdict in misses:
        print(f"\n{control.name}, seed {seed}, is wrong:")
        for check in verdict.checks:
            print(f"  {check.test} {check.verdict}: {check.reason}", flush=True)
    print(f"\n{len(misses)} wrong of {sum(len(tally.verdicts) for tally in tallies)} verdicts", flush=True)
    return len(misses)


def target_of(control: Control) -> tuple[str, tuple[str, ...]]:
    """Return what a control is a change of: controls of one target share their baseline's trials."""
    return control.target, control.knobs


def judge_target(controls: Sequence[Control], repeats: int, *, device: str) -> list[Tally]:
    """Return the verdicts on the controls of one target."""
    tallies = [Tally(control) for control in controls]
    with open_runs(device) as runs:
        for seed in range(repeats):
            for tally in tallies:
                tally.verdicts[seed] = runs.judge(tally.control, seed)
            runs.close(controls[0])
    return tallies


@contextmanager
def open_runs(device: str) -> Iterator[GateRuns]:
    """Yield what runs controls on a device; its files are gone in the end."""
    with (
        tempfile.TemporaryDirectory(prefix="controls-") as scratch,
        open_runner(Path(scratch), ALONE[device]) as runner,
    ):
        yield GateRuns(runner)


def calibrate(repeats: int, *, device: str) -> None:
    """Print what each low precision does to the gradients of each model."""
    print(
        "| model | precision | windows | weights | noise median (largest) | its bound | bias median (largest) "
        "| its bound | verdicts | worst layer |",
        flush=True,
    )
    print("| --- | --- | ---: | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for model, target in CALIBRATED.items():
        with open_runs(device) as runs:
            opened = runs.open_target(target)
            if opened.facts.device != device:
                sys.exit(f"the trials run on {opened.facts.device}, not on {device}")
            for plan in CALIBRATION_PLANS:
                for row in calibrate_model(opened, plan, repeats):
                    print(f"| {model} | {row}", flush=True)


def calibrate_model(opened: OpenTarget, plan: GradientPlan, repeats: int) -> Iterator[str]:
    """Yield a row for each precision and point; the gradients in float64 are looked at where a search would."""
    found: dict[str, list[tuple[GradientEquivalence, ...]]] = {precision: [] for precision in LOW_PRECISIONS}
    for seed in range(repeats):
        gate = opened.open_gate(seed, plan, looks_closer=False)
        for precision, seeds in found.items():
            config: TrainConfig = opened.change(precision=precision)
            checks = gate.screen(config) or ()
            seeds.append(next((check.fidelity for check in checks if check.test == "gradients"), ()))
        gate.discard()
    for precision, seeds in found.items():
        if not any(seeds):
            yield f"{precision} | {plan.windows} | it does not run here | | | | | | |"
        for number in range(max(map(len, seeds))):
            points = [fidelity[number] for fidelity in seeds if len(fidelity) > number]
            yield f"{precision} | {plan.windows} | {describe_points(points)} |"


def describe_points(points: Sequence[GradientEquivalence]) -> str:
    """Return what many seeds showed at one point."""
    noises = [point.noise for point in points if point.noise is not None]
    biases = [point.bias for point in points if point.bias is not None]
    verdicts = Counter(point.verdict for point in points)
    layer = max(points, key=lambda point: point.worst_bias or 0.0)
    return " | ".join(
        (
            points[0].point,
            *describe_intervals(noises),
            *describe_intervals(biases),
            ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()),
            f"{layer.worst_layer} {layer.worst_bias or 0.0:.2%}",
        )
    )


def describe_intervals(intervals: Sequence[Interval]) -> tuple[str, str]:
    """Return the estimates and their upper bounds, each as median and largest."""
    if not intervals:
        return "", ""
    estimates = [interval.estimate for interval in intervals]
    bounds = [interval.high for interval in intervals]
    return describe_values(estimates), describe_values(bounds)


def describe_values(values: Sequence[float]) -> str:
    """Return the median of some shares and the largest of them."""
    return f"{statistics.median(values):.3%} ({max(values):.3%})"


if __name__ == "__main__":
    main()
