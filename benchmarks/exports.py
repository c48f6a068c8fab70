"""Time the demo under other tools with exported settings, against autotune's own loop with the same settings, in pairs.

    python benchmarks/exports.py [--pairs 8] [--steps 150] [--profile best.json] [--only NAME ...] [--json FILE]
    python benchmarks/exports.py --json FILE --table        the table of docs/exports.md, of what FILE holds

With --json a form that is in the file already is not timed again: the forms can be timed one by one.

Each run is a fresh process that is given the exported text: `TrainingArguments` from the JSON, Lightning's Trainer from
the YAML, `accelerate launch` with its file, the plain PyTorch module. What a form leaves to be written by hand is
written as it says. Both runs of a pair come one right after the other, in an order that alternates. A rate is taken
from the calls of the loss, the first of them left out. Without a profile the settings are a few that any CPU has.
Let nothing else run beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from autotune.emit.export import EXPORTERS, Export, Request
from autotune.emit.export.by_hand import list_lines
from autotune.engine.allocator import launch_environment
from autotune.machine.hardware import read_hardware
from autotune.measure.confidence import paired_ratio
from autotune.records import Profile, TrainConfig
from autotune.records.measurement import Interval

BASELINE = TrainConfig(micro_batch_size=32)
TUNED = BASELINE.replace(
    num_workers=1, prefetch_factor=4, persistent_workers=True, optimizer_implementation="fused", num_threads=1
)
OWN = "autotune"
WARMUP_SHARE = 0.25
"""Of the steps: processes, workers and caches have to get going."""


def read_settings(profile: Path | None) -> Request:
    """Return the settings to export."""
    if profile is None:
        return Request(config=TUNED, baseline=BASELINE)
    answer = Profile.load(profile)
    hardware = answer.hardware
    libraries = read_hardware().host_allocators
    return Request(answer.config, answer.baseline_config, libraries=libraries, on_gpu=bool(hardware.gpus))


class TimedDemo:
    """The demo as a workload that notes when it was asked for a loss, over so many steps."""

    def __init__(self, request: Request, steps: int) -> None:
        """Take the demo, and as many of its samples as the steps take."""
        from torch.utils.data import Subset

        from autotune.targets.demo import DemoWorkload

        self._demo, self._config = DemoWorkload(), request.config
        self._times: list[float] = []
        self._samples = Subset(self._demo.train_dataset(), range(steps * request.config.effective_batch_size))
        self.baseline, self.gradient_clip_norm = request.baseline, self._demo.gradient_clip_norm
        self.build_model, self.build_optimizer = self._demo.build_model, self._demo.build_optimizer

    def train_dataset(self) -> Any:
        """Return the samples."""
        return self._samples

    def compute_loss(self, model: Any, batch: Any) -> Any:
        """Return the loss, and note the time."""
        self._times.append(time.perf_counter())
        return self._demo.compute_loss(model, batch)

    @property
    def samples_per_second(self) -> float:
        """Rate after the first calls."""
        times = self._times[int(WARMUP_SHARE * len(self._times)) :]
        return self._config.micro_batch_size * (len(times) - 1) / (times[-1] - times[0])


def run_autotune(request: Request, demo: TimedDemo, steps: int) -> None:
    """Train in autotune's own loop."""
    import torch

    from autotune.engine.loop import Training, backend_settings
    from autotune.targets.workload import check_workload

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded = check_workload(demo, label="demo", fingerprint="demo")
    with backend_settings(request.config):
        training = Training(loaded, request.config, device=device, seed=0)
        for _ in range(steps):
            training.step()


def run_torch(request: Request, demo: TimedDemo, steps: int) -> None:
    """Train by the exported module."""
    names: dict[str, Any] = {"__name__": "exported"}
    exec(compile(EXPORTERS["torch"](request).text, "exported.py", "exec"), names)
    names["train"](demo, epochs=1)


def run_hf(request: Request, demo: TimedDemo, steps: int) -> None:
    """Train by transformers' Trainer, from the JSON over the demo's own settings."""
    from torch.utils.data import default_collate
    from transformers import HfArgumentParser, Trainer, TrainingArguments

    exported = EXPORTERS["hf"](request)
    by_hand(exported)
    own = {
        "per_device_train_batch_size": request.baseline.micro_batch_size,
        "gradient_accumulation_steps": request.baseline.gradient_accumulation_steps,
        "dataloader_drop_last": True,
        "max_steps": steps,
        "save_strategy": "no",
        "report_to": [],
        "learning_rate": 3e-3,
    }
    (arguments,) = HfArgumentParser(TrainingArguments).parse_dict(own | json.loads(exported.text))
    model = as_module(demo)
    Trainer(
        model=model,
        args=arguments,
        train_dataset=demo.train_dataset(),
        data_collator=lambda samples: {"batch": default_collate(samples)},
    ).train()


def as_module(demo: TimedDemo) -> Any:
    """Return the demo's model as one that returns its loss."""
    import torch

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = demo.build_model()

        def forward(self, batch: Any) -> Any:
            return {"loss": demo.compute_loss(self.model, batch)}

    return WithLoss()


def run_lightning(request: Request, demo: TimedDemo, steps: int) -> None:
    """Train by Lightning's Trainer, from the YAML."""
    import lightning
    import yaml

    exported = EXPORTERS["lightning"](request)
    arguments = by_hand(exported)

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = demo.build_model()

        def training_step(self, batch: Any, index: int) -> Any:
            return demo.compute_loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return build_optimizer(self.model, arguments)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    settings = yaml.safe_load(exported.text)["trainer"]
    trainer = lightning.Trainer(max_steps=steps, gradient_clip_val=demo.gradient_clip_norm, **quiet, **settings)
    module: Any = Module()
    if request.config.compile_mode != "off":
        import torch

        module = torch.compile(module, **arguments.get("torch.compile", {}))
    trainer.fit(module, build_loader(request, demo, arguments))


def run_accelerate(request: Request, demo: TimedDemo, steps: int) -> None:
    """Train by Accelerate, in a process that `accelerate launch` has started with the file."""
    import accelerate

    arguments = by_hand(EXPORTERS["accelerate"](request))
    accelerator = accelerate.Accelerator(**arguments.get("accelerate.Accelerator", {}))
    model = demo.build_model()
    optimizer = build_optimizer(model, arguments)
    model, optimizer, loader = accelerator.prepare(model, optimizer, build_loader(request, demo, arguments))
    for batch in loader:
        with accelerator.accumulate(model):
            with accelerator.autocast():
                loss = demo.compute_loss(model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), demo.gradient_clip_norm)
            optimizer.step()
            optimizer.zero_grad()


def by_hand(exported: Export) -> dict[str, dict[str, Any]]:
    """Run the lines for the process; return the arguments of the calls, by what is called."""
    import accelerate.utils
    import torch

    calls: dict[str, dict[str, Any]] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda *_, **named: calls.update({name: named})

    for line in list_lines(exported.unmapped):
        if "..." not in line:
            exec(line, {"torch": torch})
            continue
        utils = SimpleNamespace(DataLoaderConfiguration=accelerate.utils.DataLoaderConfiguration)
        libraries = SimpleNamespace(Accelerator=note("accelerate.Accelerator"), utils=utils)
        optimizers = SimpleNamespace(optim=SimpleNamespace(AdamW=note("torch.optim.AdamW")))
        exec(line, {"DataLoader": note("DataLoader"), "accelerate": libraries, "torch": optimizers})
    return calls


def build_loader(request: Request, demo: TimedDemo, arguments: dict[str, dict[str, Any]]) -> Any:
    """Return the demo's own loader with the arguments that were exported."""
    from torch.utils.data import DataLoader

    own = {"batch_size": request.baseline.micro_batch_size, "num_workers": request.baseline.num_workers}
    given = own | arguments.get("DataLoader", {})
    return DataLoader(demo.train_dataset(), shuffle=True, drop_last=True, **given)


def build_optimizer(model: Any, arguments: dict[str, dict[str, Any]]) -> Any:
    """Return the demo's own optimizer with the arguments that were exported."""
    import torch

    return torch.optim.AdamW(model.parameters(), lr=3e-3, **arguments.get("torch.optim.AdamW", {}))


ARMS: dict[str, Callable[[Request, TimedDemo, int], None]] = {
    OWN: run_autotune,
    "torch": run_torch,
    "hf": run_hf,
    "lightning": run_lightning,
    "accelerate": run_accelerate,
}


def run_arm(name: str, request: Request, steps: int) -> None:
    """Train in this process and print the rate."""
    demo = TimedDemo(request, steps)
    ARMS[name](request, demo, steps)
    print(json.dumps({"samples_per_second": demo.samples_per_second}))


def start_arm(name: str, request: Request, steps: int, profile: Path | None) -> float:
    """Return the rate of an arm in a fresh process."""
    words = [__file__, "--arm", name, "--steps", str(steps), *(["--profile", str(profile)] if profile else [])]
    environment = {**os.environ, **launch_environment(request.config, request.libraries or {})}
    environment |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        start = [sys.executable]
        if name == "accelerate":
            file = Path(folder) / "accelerate.yaml"
            file.write_text(EXPORTERS[name](request).text)
            start += ["-m", "accelerate.commands.launch", "--config_file", str(file)]
            # As the file's comment says where the threads are PyTorch's own choice.
            environment.setdefault(
                "OMP_NUM_THREADS", str(request.config.num_threads or read_hardware().core_count or 1)
            )
        done = subprocess.run(
            [*start, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    rate: float = json.loads(done.stdout.strip().splitlines()[-1])["samples_per_second"]
    return rate


def compare(
    name: str, request: Request, *, pairs: int, steps: int, profile: Path | None
) -> tuple[Interval, list[float]]:
    """Return how many times as fast a form is as autotune's own run, and its rates."""
    theirs: list[float] = []
    ours: list[float] = []
    for index in range(pairs):
        order = [(name, theirs), (OWN, ours)]
        for arm, rates in order if index % 2 else order[::-1]:
            rates.append(start_arm(arm, request, steps, profile))
    return paired_ratio(theirs, ours, confidence_level=0.95), theirs


def main() -> None:
    """Time what is asked for and print a row for each form."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--profile", type=lambda text: Path(text).resolve(), help="an answer for the demo")
    parser.add_argument("--only", nargs="+", choices=[name for name in ARMS if name != OWN])
    parser.add_argument("--json", type=Path, help="keep the figures here, and go on from those that it has")
    parser.add_argument("--table", action="store_true", help="time nothing")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    request = read_settings(asked.profile)
    if asked.arm is not None:
        run_arm(asked.arm, request, asked.steps)
        return
    figures = json.loads(asked.json.read_text()) if asked.json is not None and asked.json.exists() else {}
    wanted = [] if asked.table else asked.only or [name for name in ARMS if name != OWN]
    for name in (one for one in wanted if one not in figures):
        ratio, rates = compare(name, request, pairs=asked.pairs, steps=asked.steps, profile=asked.profile)
        figures[name] = {"estimate": ratio.estimate, "low": ratio.low, "high": ratio.high, "samples_per_second": rates}
        if asked.json is not None:
            asked.json.write_text(json.dumps(figures, indent=2) + "\n")
    print("\n".join(list_table(figures)))


def list_table(figures: dict[str, Any]) -> list[str]:
    """Return a row for each form, as docs/exports.md has them."""
    rows = ["| form | samples/s | over autotune's own run (95 %) | pairs |", "| --- | --- | --- | --- |"]
    for name, found in figures.items():
        rates = found["samples_per_second"]
        ratio = f"{found['estimate']:.2f}x ({found['low']:.2f}-{found['high']:.2f})"
        rows.append(f"| {name} | {sum(rates) / len(rates):,.0f} | {ratio} | {len(rates)} |")
    return rows


if __name__ == "__main__":
    main()
