"""Tune every script of tests/scripts as a user would, and print a table of what came of it.

    python benchmarks/scripts.py [--budget 2m | --no-search] [NAME ...]

For each script: a search with the given budget, its answer, whether exact knobs gave the losses of the script's own
settings bit for bit, and what was left behind in its folder. Takes about the budget and half a minute per script; let
nothing else run beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from autotune.isolation.runner import TrialRunner
from autotune.records import (
    ProbeReport,
    Profile,
    Target,
    TrainConfig,
    TrialLimits,
    TrialSpec,
    parse_record,
    read_record,
)
from autotune.targets.script import read_script, script_label

SCRIPTS = Path(__file__).parent.parent / "tests" / "scripts"
EXACT_STEPS = 20


@dataclass(frozen=True)
class Case:
    """A script and how it is called.

    Attributes:
        name: its file without the suffix.
        style: how it loops.
        command: its words, `{file}` standing for its path.
        options: of the search.
    """

    name: str
    style: str
    command: str = "python {file}"
    options: tuple[str, ...] = ()


CASES = (
    Case(
        "plain_loop",
        "for over a DataLoader, validation each epoch; placeholders",
        "python {file} --epochs 200 --batch-size {{micro_batch_size}} --accum {{gradient_accumulation_steps}}",
    ),
    Case("nano_gpt", "get_batch by hand, accumulation", "python {file} --max_iters=100000"),
    Case("iter_next", "iter() and next() by hand, EMA copy", "python {file} --steps 100000"),
    Case("gan", "two models, two optimizers", "python {file} --epochs 1000"),
    Case("wgan", "three critic steps a generator step", "python {file} --steps 100000"),
    Case("amp_scaler", "autocast, scaler, channels_last of its own", "python {file} --epochs 1000"),
    Case("compiled", "torch.compile of its own", "python {file} --epochs 1000"),
    Case("lbfgs", "closure, eight forwards a step", "python {file} --epochs 1000"),
    Case("by_hand", "no optimizer object", "python {file} --epochs 1000"),
    Case("rnn_truncated", "columns of a sequence, hidden state kept", "python {file} --epochs 1000"),
    Case("whole_batches", "items are mini-batches already", "python {file} --epochs 1000"),
    Case("trainer_class", "Trainer class, config file, swallows exceptions, exits with 1"),
    Case("augmented", "random augmentation, no seed", "python {file} --epochs 1000"),
    Case("unpicklable", "open file in the dataset", "python {file} --epochs 1000"),
    Case("recommender", "sparse and dense optimizer in one step", "python {file} --epochs 1000"),
    Case("speech", "variable lengths, bucketing sampler, CTC", "python {file} --epochs 1000"),
    Case("validation_heavy", "half of the time validates"),
    Case("two_backwards", "two backwards a step, tied weights, no root call", "python {file} --epochs 1000"),
    Case("random_labels", "nothing to learn, no seed", "python {file} --epochs 1000"),
    Case("hf_trainer", "Hugging Face Trainer", "python {file} --steps 100000"),
    Case("lightning_fit", "Lightning Trainer", "python {file} --epochs 1000"),
    Case("accelerated", "Accelerate", "python {file} --epochs 1000"),
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", default="2m", help="of each search")
    parser.add_argument("--no-search", action="store_true", help="probe and compare losses only")
    parser.add_argument("names", nargs="*", help="scripts; all without any")
    options = parser.parse_args()
    chosen = [case for case in CASES if case.name in options.names or not options.names]
    print("| script | loop | varied | ruled out | own samples/s | answer | same losses | left behind |", flush=True)
    print("| --- | --- | --- | --- | ---: | --- | --- | --- |", flush=True)
    for case in chosen:
        print(tune(case, budget=None if options.no_search else options.budget), flush=True)


def tune(case: Case, *, budget: str | None) -> str:
    """Return a script's row of the table; without a budget it is probed only."""
    with tempfile.TemporaryDirectory(prefix="scripts-") as scratch:
        folder = Path(scratch) / "work"
        shutil.copytree(SCRIPTS, folder, ignore=shutil.ignore_patterns("__pycache__", "README.md"))
        before = snapshot(Path(scratch))
        words = shlex.split(case.command.format(file=f"{case.name}.py"))
        limits = ("--max-loss-increase", "2%", "--metric-limit", "2%")
        stage = ["search", "--budget", budget, *limits, "--no-history", *case.options] if budget else ["probe"]
        command = [sys.executable, "-P", "-m", "autotune", *stage, "--json", "--", *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        after = snapshot(Path(scratch))
        changed = (path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
        left = sorted(path for path in changed if path != "work/best.json")
        said = json.loads(done.stdout or "{}")
        if done.returncode != 0 and "verdict" not in said:  # a search that could test nothing has an answer
            error = said.get("error", {}).get("message", done.stderr[-200:])
            return f"| {case.name} | {case.style} | | | | {error} | | {', '.join(left) or 'none'} |"
        if budget:
            report = read_record(next((folder / ".autotune").glob("*/probe.json")), ProbeReport)
            answer = describe_answer(Profile.load(folder / "best.json"))
        else:
            report, answer = parse_record(done.stdout, ProbeReport, name="the probe's answer"), "not searched"
        same = compare_exact(folder, words, report)
        return " | ".join(
            (
                f"| {case.name}",
                case.style,
                describe_varied(report),
                describe_ruled_out(report),
                f"{report.measurement.samples_per_second:,.0f}",
                answer,
                same,
                f"{', '.join(left) or 'none'} |",
            )
        )


def compare_exact(folder: Path, words: list[str], report: ProbeReport) -> str:
    """Return whether the exact knobs that may be varied leave every loss what it is, bit for bit."""
    facts = report.target
    wanted = {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True, "host_allocator": "glibc-tuned"}
    fixed = {*facts.fixed, *facts.numerics} | ({"num_workers"} if facts.data.iterable else set())
    usable = {name: value for name, value in wanted.items() if name not in fixed}
    if "num_workers" in fixed:
        usable = {name: value for name, value in usable.items() if name == "host_allocator"}
    script = read_script(words)
    target = Target(spec=script_label(words), folder=str(folder), script=script)
    with tempfile.TemporaryDirectory(prefix="exact-") as scratch, TrialRunner(Path(scratch), warm=False) as run:
        results = [
            run(make_spec(number, target, config, report))
            for number, config in enumerate((facts.baseline, facts.baseline, facts.baseline.replace(**usable)))
        ]
    losses = [result.curves[0].losses if result.curves else None for result in results]
    names = ", ".join(name for name in usable)
    if losses[0] is None or losses[0] != losses[1]:
        return "the script does not repeat itself"
    return f"yes ({names})" if losses[2] == losses[0] else f"NO ({names})"


def make_spec(number: int, target: Target, config: TrainConfig, report: ProbeReport) -> TrialSpec:
    """Return a trial that trains a few steps for their losses."""
    return TrialSpec(
        number=number,
        purpose="quality",
        target=target,
        config=config,
        baseline=report.target.baseline,
        training_loaders=report.target.training_loaders,
        quality_steps=EXACT_STEPS,
        limits=TrialLimits(time_limit_seconds=120.0),
    )


def describe_varied(report: ProbeReport) -> str:
    """Return the knobs that were offered, with the number of their values."""
    from autotune.knobs import Facts
    from autotune.space import build_space

    choices = build_space(Facts(target=report.target, hardware=report.hardware)).choices
    return ", ".join(f"{name} ({len(values)})" for name, values in choices.items())


def describe_ruled_out(report: ProbeReport) -> str:
    """Return the knobs that the script itself rules out, with reasons."""
    reasons: dict[str, list[str]] = {}
    for name, reason in report.target.fixed.items():
        reasons.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items()).replace("|", "/")


def describe_answer(profile: Profile) -> str:
    """Return the answer with its interval."""
    ratio = profile.speedup
    if profile.verdict == "improved" and ratio is not None:
        changed = profile.config.model_dump()
        own = profile.baseline_config.model_dump()
        names = ", ".join(f"{name}={value}" for name, value in changed.items() if value != own[name])
        return f"improved, {ratio.low:.2f}-{ratio.high:.2f}x ({names})"
    refused = next((check.reason for check in profile.quality if check.verdict != "non-inferior"), "")
    return f"{profile.verdict}{f': {refused}' if refused else ''}".replace("|", "/")


def snapshot(folder: Path) -> dict[str, str]:
    """Return every file below a folder with a digest of its content."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and ".autotune" not in path.parts)
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in files}


if __name__ == "__main__":
    main()
