"""Every script of tests/scripts: what the probe must rule out and why; exact knobs change no bit of its losses."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from test_script_trials import SCRIPTS, TORCHRUN, Project, losses_of, open_project

from autotune.knobs import Facts
from autotune.machine.hardware import read_hardware
from autotune.probe.data.generators import OWN_GENERATOR
from autotune.records.facts import TargetFacts
from autotune.space import SearchSpace, build_space

EXACT = ("num_workers", "prefetch_factor", "persistent_workers", "host_allocator")
NO_LOADER = {"num_workers": "no DataLoader", "prefetch_factor": "no DataLoader", "persistent_workers": "no DataLoader"}
PARTS = {"detection_parts", "trainer_class_model"}
"""Modules that scripts import."""


def no_workers(reason: str) -> dict[str, str]:
    return dict.fromkeys(("num_workers", "prefetch_factor", "persistent_workers"), reason)


@dataclass(frozen=True)
class Wild:
    """What is expected of a script.

    Attributes:
        command: its words after the interpreter.
        batch: samples of a micro batch, and micro batches of a step.
        ruled_out: knobs that must stay as they are, each with a word of the reason.
        draws: generators that its samples draw from, so that loader knobs are no longer exact.
        package: it needs.
        steps: it takes.
    """

    command: tuple[str, ...]
    batch: tuple[int, int]
    ruled_out: dict[str, str] = field(default_factory=dict)
    draws: tuple[str, ...] = ()
    package: str = "torch"
    steps: int = 10


WILD = {
    "accelerated": Wild(("accelerated.py",), (32, 2), package="accelerate"),
    "amp_scaler": Wild(
        ("amp_scaler.py",), (64, 1), {"precision": "casts by itself", "memory_format": "lays its model out itself"}
    ),
    "augmented": Wild(("augmented.py",), (32, 1), draws=("numpy", "random", "torch")),
    "by_hand": Wild(("by_hand.py",), (32, 1), NO_LOADER | {"optimizer_implementation": "without an optimizer"}),
    "closure_inside": Wild(("closure_inside.py",), (64, 1), {"optimizer_implementation": "SAM"}),
    "compiled": Wild(("compiled.py",), (128, 1), {"compile_mode": "compiles its model by itself"}),
    "not compiled": Wild(("compiled.py", "--no-compile"), (128, 1)),
    "ddp": Wild(
        (*TORCHRUN, "ddp.py"),
        (32, 1),
        {
            "memory_format": "DistributedDataParallel",
            "distributed_strategy": "by itself",
            "reshard_after_forward": "fully_shard",
        },
    ),
    "ddp alone": Wild(("ddp.py",), (32, 1)),
    "detection": Wild(("detection.py",), (16, 1)),
    "double": Wild(("double.py",), (200, 1), {"precision": "float64", "optimizer_implementation": "MyAdam"}),
    "endless": Wild(("endless.py",), (64, 1), NO_LOADER),
    "fsdp": Wild(
        (*TORCHRUN, "fsdp.py"),
        (16, 2),
        {
            "distributed_strategy": "by itself",
            "reduce_dtype": "policy",
            **dict.fromkeys(("bucket_cap_mb", "gradient_as_bucket_view", "static_graph"), "DistributedDataParallel"),
        },
    ),
    "gan": Wild(("gan.py",), (64, 1)),
    "graph": Wild(("graph.py",), (3000, 1), NO_LOADER),
    "hf_trainer": Wild(("hf_trainer.py",), (16, 1), package="transformers"),
    "iter_next": Wild(("iter_next.py",), (64, 1)),
    "lbfgs": Wild(("lbfgs.py",), (1400, 1), NO_LOADER | {"optimizer_implementation": "LBFGS"}),
    "lightning_fit": Wild(("lightning_fit.py",), (64, 1), package="lightning"),
    "nano_gpt": Wild(("nano_gpt.py",), (12, 2), NO_LOADER),
    "own_generator": Wild(
        ("own_generator.py",), (64, 1), no_workers("random generator of its own"), draws=(OWN_GENERATOR,)
    ),
    "own_generator, seeded in its workers": Wild(
        ("own_generator.py", "--num-workers", "2", "--reseed"), (64, 1), draws=(OWN_GENERATOR,)
    ),
    "package_style": Wild(("-m", "package_style.train"), (64, 1)),
    "plain_loop": Wild(("plain_loop.py",), (64, 1)),
    "plain_loop with workers": Wild(("plain_loop.py", "--num-workers", "1"), (64, 1)),
    "plain_loop, accumulating": Wild(("plain_loop.py", "--batch-size", "16", "--accum", "3"), (16, 3)),
    "random_labels": Wild(("random_labels.py",), (64, 1)),
    "recommender": Wild(("recommender.py",), (512, 1), {"optimizer_implementation": "SparseAdam"}),
    "rnn_truncated": Wild(("rnn_truncated.py",), (35, 1), NO_LOADER),  # the first dimension is time
    "short": Wild(("short.py",), (512, 1), NO_LOADER, steps=6),
    "speech": Wild(("speech.py",), (24, 1)),
    "stream": Wild(("stream.py",), (64, 1), {"num_workers": "iterable"}),
    "swa": Wild(("swa.py",), (100, 1)),
    "trainer_class": Wild(("trainer_class.py",), (48, 1)),
    "two_backwards": Wild(("two_backwards.py",), (32, 1)),
    "unpicklable": Wild(("unpicklable.py",), (50, 1), no_workers("cannot be pickled")),
    "validation_heavy": Wild(("validation_heavy.py",), (32, 1)),
    "wgan": Wild(("wgan.py",), (128, 3)),
    "whole_batches": Wild(("whole_batches.py",), (128, 1)),
    "whole_batches wrapped": Wild(("whole_batches.py", "--wrapped"), (1, 1)),
}


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    with open_project(tmp_path) as project:
        yield project


def test_every_script_is_in_the_table() -> None:
    files = {path.stem for path in SCRIPTS.glob("*.py")} - PARTS
    named = {Path(word).stem for wild in WILD.values() for word in wild.command if word.endswith(".py")}
    assert named == files
    assert {folder.name for folder in SCRIPTS.iterdir() if (folder / "__init__.py").exists()} == {"package_style"}


def choose_exact(space: SearchSpace, facts: TargetFacts) -> dict[str, Any]:
    """Return another value for every knob that must change no bit."""
    free = [name for name in EXACT if name in space.choices and facts.numerics.get(name, "exact") == "exact"]
    others = {name: [one for one in space.choices[name] if one != getattr(facts.baseline, name)] for name in free}
    return {name: values[-1] if name == "num_workers" else values[0] for name, values in others.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", WILD)
def test_exact_knobs_change_no_bit_and_the_others_are_ruled_out(project: Project, name: str) -> None:
    wild = WILD[name]
    if importlib.util.find_spec(wild.package) is None:
        pytest.skip(f"{wild.package} is not installed")
    before = project.snapshot()
    probe = project.run(*wild.command, purpose="probe", config=None, baseline=None)
    facts = probe.facts
    assert facts is not None
    assert (facts.baseline.micro_batch_size, facts.baseline.gradient_accumulation_steps) == wild.batch
    assert facts.data.random_sources == wild.draws

    space = build_space(Facts(target=facts, hardware=read_hardware()))
    reasons: dict[str, list[str]] = {}
    for one in space.ruled_out:
        reasons.setdefault(one.knob, []).append(one.reason)
    assert not {*wild.ruled_out} & {*space.choices}
    assert [knob for knob, word in wild.ruled_out.items() if not any(word in text for text in reasons[knob])] == []
    by_the_script = {knob for knob in facts.fixed if knob not in ("micro_batch_size", "pin_memory")}
    assert by_the_script <= {*wild.ruled_out}  # nothing else is given up

    changes = choose_exact(space, facts)
    assert ("num_workers" in changes) == ("num_workers" not in wild.ruled_out and not wild.draws)
    options: dict[str, Any] = {"baseline": facts.baseline, "training_loaders": facts.training_loaders}
    expected = losses_of(project.run(*wild.command, config=facts.baseline, **options))
    assert len(expected) == wild.steps
    assert len({*expected}) > wild.steps // 2
    seen = losses_of(probe)[: wild.steps]
    assert len(seen) >= 3
    assert seen == expected[: len(seen)]  # looking at a script changes nothing
    assert losses_of(project.run(*wild.command, config=facts.baseline.replace(**changes), **options)) == expected
    assert project.snapshot() == before
