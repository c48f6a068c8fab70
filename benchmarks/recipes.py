"""Race the hand-made recipes: a training as its team had it, their recipe applied by hand, and what a search finds.

    python benchmarks/recipes.py [--budget 6m] [--rounds 8] [--only NAME ...] [--out FILE]
    python benchmarks/recipes.py --show FILE        the table of an earlier race again

For each of examples/{knowledge_tracing,text_price,detector,anti_spoofing}: `autotune search --preset recipe.json`, as
somebody who has a recipe would start it; then its winner, the recipe and the own settings in interleaved rounds of
fresh processes; then trainings of each from seeds that the search has not seen. On a GPU the examples have their `gpu`
size. What a recipe asks of hardware that is not there is left out, as the team's own code would have done. Prints one
table and writes it with all figures as JSON. Takes two to three times the budget for each; let nothing else run beside
it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import AutotuneError, NothingFeasibleError
from autotune.isolation.runner import TrialRunner
from autotune.machine.hardware import read_hardware
from autotune.presets import find_preset
from autotune.records import ProbeReport, Profile, Target, TrainConfig, read_record
from autotune.records.codec import Record, write_record
from autotune.records.config import is_user_knob
from autotune.records.hardware import HardwareInfo
from autotune.records.measurement import Interval
from autotune.records.quality import QualityCheck
from autotune.records.search import Preset
from autotune.space import BATCH_KNOBS
from autotune.targets.drift_limits import GivenLimits, join_limits

from race import Course, Outcome, find_ratio

EXAMPLES = Path(__file__).parent.parent / "examples"
GPU_ONLY = frozenset(
    {"precision", "matmul_precision", "cudnn_benchmark", "pin_memory", "non_blocking", "device_allocator"}
)
"""What the teams' own code switches off, or what has no effect, without a GPU."""

RECIPE, FAIR, FOUND = "recipe", "recipe, same training", "autotune"
"""The arms: the recipe; without what it changes of model and effective batch, if it does; what the search found."""

_WHOLE = 99.5

HEADER = ("training", "arm", "claimed", "over its own settings", "over the recipe", "learns", "changes")


@dataclass(frozen=True)
class Recipe:
    """A training that was sped up by hand.

    Attributes:
        name: folder under examples/.
        claimed: speed-up in the team's words.
        file: the recipe as a preset, in that folder.
        metric_limits: as a user would ask for them.
        gpu_only: what its own code does on a GPU alone, beside what needs one anyway.
        steps: optimizer steps of the trainings that are compared; a warm-up has to be a small part of them.
    """

    name: str
    claimed: str
    file: str = "recipe.json"
    metric_limits: tuple[str, ...] = ()
    gpu_only: frozenset[str] = frozenset()
    steps: int = 100


RECIPES = (
    Recipe("knowledge_tracing", "> 2.3x"),
    Recipe(
        "text_price", "3-4x", gpu_only=frozenset({"num_workers", "prefetch_factor", "persistent_workers"}), steps=300
    ),
    Recipe("detector", "2-5x (GPU), 1.5-2x (CPU)"),
    Recipe("anti_spoofing", "5-10x", file="presets/balanced.json", metric_limits=("eer=0.1pp",)),
)


class Race(Record):
    """What came of one recipe."""

    training: str
    """Folder of the example."""
    machine: str
    """Where."""
    torch: str
    """With which version."""
    budget: str
    """Of the search."""
    steps: int
    """Of each training that was compared, four seeds an arm."""
    claimed: str
    """Speed-up of the recipe in the team's words."""
    outcomes: tuple[Outcome, ...]
    """The own settings and the other arms."""
    against_recipe: Interval | None
    """What the search found over the recipe, of which only what is the same training counts; paired."""
    verdict: str
    """Of the search: improved, keep or inconclusive."""
    claim: Interval | None
    """Speed-up that the search claimed by its low end; None where it is not known."""
    checks: tuple[QualityCheck, ...]
    """The search's own drift checks of what it found."""
    notes: tuple[str, ...]
    """What the search had to say."""
    seconds: dict[str, float]
    """Of the search, of the race and of the trainings."""


class Races(Record):
    """The table."""

    races: tuple[Race, ...] = ()
    """In the order of the recipes."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", default="6m", help="of each search")
    parser.add_argument("--rounds", type=int, default=8, help="of launches in each race, at least 2")
    parser.add_argument("--only", nargs="+", choices=[recipe.name for recipe in RECIPES], metavar="NAME")
    parser.add_argument(
        "--out", type=Path, default=Path("recipes.json"), help="races of other trainings in it are kept"
    )
    parser.add_argument("--show", type=Path, metavar="FILE", help="print its table and measure nothing")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds is {options.rounds}: a ratio needs at least 2")
    try:
        if not options.show:
            race_all([one for one in RECIPES if options.only is None or one.name in options.only], options)
        print_table(read_record(options.show or options.out, Races))
    except AutotuneError as error:
        sys.exit(f"error: {error.message}\n  {error.hint}")
    except OSError as error:
        sys.exit(f"error: {error.filename}: {error.strerror}")


def race_all(recipes: Sequence[Recipe], options: argparse.Namespace) -> None:
    """Race some recipes, each written to the file as soon as it is done.

    Raises:
        AutotuneError: the file holds something else, or a recipe is no preset.
        OSError: the file cannot be written.
    """
    races = read_record(options.out, Races) if options.out.exists() else Races()
    write_record(options.out, races)  # before hours are spent on what could not be written
    order = [recipe.name for recipe in RECIPES]
    for recipe in recipes:
        race = run_recipe(recipe, budget=options.budget, rounds=options.rounds)
        others = [one for one in races.races if one.training != recipe.name]
        races = Races(races=tuple(sorted([*others, race], key=lambda one: order.index(one.training))))
        write_record(options.out, races)


def run_recipe(recipe: Recipe, *, budget: str, rounds: int) -> Race:
    """Search one example, then race what was found against the recipe and the own settings."""
    hardware = read_hardware()
    for name in ("EXAMPLE_DATA", "EXAMPLE_ENCODER"):
        os.environ.pop(name, None)
    os.environ["EXAMPLE_SIZE"] = "gpu" if hardware.gpus else "cpu"
    preset = find_preset(str(EXAMPLES / recipe.name / recipe.file))
    with tempfile.TemporaryDirectory(prefix="recipes-") as scratch:
        target = Target(spec=f"{EXAMPLES / recipe.name / 'workload.py'}:workload", folder=scratch)
        began = time.monotonic()
        profile = search(target, recipe, budget=budget)
        seconds = {"search": time.monotonic() - began}
        report = read_record(next(Path(scratch, ".autotune").glob("*/probe.json")), ProbeReport)
        arms = list_arms(recipe, preset, profile, has_gpu=bool(hardware.gpus))
        with TrialRunner(Path(scratch), host_allocators=hardware.host_allocators) as runner:
            course = Course(target, report, runner)
            limits = join_limits(GivenLimits(metrics=recipe.metric_limits).read())
            outcomes = course.run(arms, limits, rounds=rounds, steps=recipe.steps)
    return Race(
        training=recipe.name,
        machine=describe_machine(hardware),
        torch=report.software.torch,
        budget=budget,
        steps=recipe.steps,
        claimed=recipe.claimed,
        outcomes=outcomes,
        against_recipe=compare_with_recipe(outcomes),
        verdict=profile.verdict,
        claim=profile.speedup,
        checks=profile.quality,
        notes=profile.evidence.notes,
        seconds={**seconds, **course.seconds},
    )


def describe_machine(hardware: HardwareInfo) -> str:
    """Return the GPU, or the CPU where there is none, in words."""
    return hardware.gpus[0].name if hardware.gpus else f"{hardware.usable_cpu_count} cores of {hardware.cpu_name}"


def compare_with_recipe(outcomes: Sequence[Outcome]) -> Interval | None:
    """Return what the search found over the recipe, of which only the same training counts; None for equal settings."""
    arms = {outcome.arm: outcome for outcome in outcomes}
    found, recipe = arms[FOUND], arms.get(FAIR, arms[RECIPE])
    if found.changes == recipe.changes or found.failure or recipe.failure:
        return None
    return find_ratio(found.samples_per_second, recipe.samples_per_second)


def search(target: Target, recipe: Recipe, *, budget: str) -> Profile:
    """Return the answer of a search that knows the recipe."""
    command = [sys.executable, "-m", "autotune", "search", target.spec, "--budget", budget, "--no-history"]
    command += ["--preset", str(EXAMPLES / recipe.name / recipe.file)]
    command += [word for limit in recipe.metric_limits for word in ("--metric-limit", limit)]
    ended = subprocess.run(command, cwd=target.folder, stdout=sys.stderr, check=False).returncode
    if ended not in (0, NothingFeasibleError.exit_code):  # a search that could test nothing has an answer
        sys.exit(f"error: the search of {recipe.name} ended with status {ended}")
    return Profile.load(Path(target.folder) / "best.json")


def list_arms(recipe: Recipe, preset: Preset, profile: Profile, *, has_gpu: bool) -> dict[str, TrainConfig]:
    """Return the settings of each arm but the team's own."""
    left_out = frozenset() if has_gpu else GPU_ONLY | recipe.gpu_only
    settings = {name: value for name, value in preset.settings.items() if name not in left_out}
    plain = {name: value for name, value in settings.items() if not is_user_knob(name) and name not in BATCH_KNOBS}
    arms = {RECIPE: settings, **({FAIR: plain} if plain != settings else {})}
    own = profile.baseline_config
    return {**{arm: preset.replace(settings=some).apply_to(own) for arm, some in arms.items()}, FOUND: profile.config}


def print_table(races: Races) -> None:
    """Print a row for each arm of each training."""
    for where in dict.fromkeys(
        f"{one.machine}, torch {one.torch}, {one.budget} for each search" for one in races.races
    ):
        print(where)
    print()
    for cells in (HEADER, ["---"] * len(HEADER), *(row for race in races.races for row in list_rows(race))):
        print(f"| {' | '.join(cells)} |")


def list_rows(race: Race) -> list[Sequence[str]]:
    """Return the rows of one training."""
    rows: list[Sequence[str]] = []
    for outcome in race.outcomes[1:]:
        is_found = outcome.arm == FOUND
        speed = describe_ratio(outcome.speedup) if outcome.speedup else outcome.failure or "1, by definition"
        against = describe_ratio(race.against_recipe) if is_found and race.against_recipe else ""
        arm, claimed = (f"{FOUND}: {race.verdict}", "") if is_found else (outcome.arm, race.claimed)
        changes = " ".join(f"{name.removeprefix('user_knobs.')}={value}" for name, value in outcome.changes.items())
        rows.append((race.training, arm, claimed, speed, against, describe_learning(outcome), changes or "none"))
    return rows


def describe_ratio(ratio: Interval) -> str:
    """Return `1.23x (1.20-1.26)`."""
    return f"{ratio.estimate:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})"


def describe_learning(outcome: Outcome) -> str:
    """Return what an arm's trainings showed, by the check that matters most: of a metric, where one tells."""
    if not outcome.changes:
        return "the same settings"
    for verdict, word in (("inferior", "worse"), ("inconclusive", "open"), ("non-inferior", "as well")):
        found = [check for check in outcome.checks if check.verdict == verdict]
        if found:
            return f"{word}: {describe_check(next((one for one in found if one.test == 'metric'), found[0]))}"
    return "not compared"


def describe_check(check: QualityCheck) -> str:
    """Return a check in a few words: positive is worse."""
    if check.difference is None:
        return f"{check.metric}: {check.reason}"
    factor, unit = (100.0, " %") if check.margin.unit == "relative" else (1.0, "")
    low, high = (factor * one for one in (check.difference.low, check.difference.high))
    limit = f"{factor * check.margin.amount:.3g}{unit}"
    return f"{check.metric} {format_change(low)} to {format_change(high)}{unit} (limit {limit})"


def format_change(change: float) -> str:
    """Return a change with two digits, all of them where it has more before the point."""
    return f"{change:+.0f}" if abs(change) >= _WHOLE else f"{change:+.2g}"


if __name__ == "__main__":
    main()
