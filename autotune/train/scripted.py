"""Entry of a script's final training: the hooks apply the settings and count; the script runs as it always does."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from autotune.records.config import TrainConfig
from autotune.targets.launch import Launch
from autotune.trial.scripted import run_script
from autotune.units import format_rate

if TYPE_CHECKING:
    from autotune.engine.hooks.steps import ScriptStep


class ScriptTraining:
    """Counts what a script trains.

    Args:
        plan: what `prepare_script_run` wrote.
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self._samples = self._steps = 0
        self._first = self._last = self._aside = 0.0
        self._aside_since: float | None = None
        self._stack = ExitStack()

    def install(self) -> None:
        """Hang up the hooks; called when the script has imported torch."""
        from autotune.engine.hooks.script import ScriptHooks, ScriptSettings

        settings = ScriptSettings(
            TrainConfig(**self._plan["config"]),
            frozenset(self._plan["changed"]),
            tuple(self._plan["training_loaders"]),
        )
        hooks = ScriptHooks(settings, on_step=self._take, turn=self._turn, now=time.perf_counter)
        self._stack.enter_context(hooks.installed())

    def _turn(self, is_training: bool) -> None:
        if not is_training and self._aside_since is None:
            self._aside_since = time.perf_counter()
        elif is_training and self._aside_since is not None:
            self._aside += time.perf_counter() - self._aside_since
            self._aside_since = None

    def _take(self, step: ScriptStep) -> None:
        self._last = time.perf_counter()
        if self._steps:
            self._samples += step.samples * int(os.environ.get("WORLD_SIZE", "1"))
        else:
            self._first = self._last  # the first step also compiles, and starts the workers
        self._steps += 1

    def summarize(self, status: int) -> dict[str, Any]:
        """Return what was trained."""
        seconds = self._last - self._first - self._aside
        return {
            "exit_status": status,
            "steps": self._steps,
            "samples_per_second": self._samples / seconds if self._samples and seconds > 0 else None,
            "promised_samples_per_second": self._plan["promised"],
            "changed": self._plan["changed"],
        }


def main(plan: dict[str, Any], arguments: list[str]) -> int:
    """Run the script to its end and return its exit status."""
    answer = sys.stdout
    if plan["json"]:
        answer = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # standard output is for the answer alone
    launch = Launch(sys.executable, tuple(plan["interpreter_options"]), plan["kind"], plan["name"], tuple(arguments))
    training = ScriptTraining(plan)
    status = 1
    try:
        status = run_script(launch, on_torch=training.install)
    finally:
        if os.environ.get("RANK", "0") == "0":
            _report(training.summarize(status), answer if plan["json"] else None)
    return status


def _report(summary: dict[str, Any], answer: Any) -> None:
    if answer is not None:
        answer.write(json.dumps(summary) + "\n")
        answer.flush()
        return
    rate, promised = summary["samples_per_second"], summary["promised_samples_per_second"]
    measured = "" if rate is None else f", {format_rate(rate)}"
    against = "" if promised is None or rate is None else f" (the search measured {format_rate(promised)})"
    sys.stderr.write(f"autotune: {summary['steps']:,} steps{measured}{against}\n")


if __name__ == "__main__":
    os.environ.pop("PYTHONSAFEPATH", None)
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2:]))
