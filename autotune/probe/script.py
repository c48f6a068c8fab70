"""Inside the probe's process: what the hooks have seen of a script, as the facts the search space is built from."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from autotune.engine.activation_checkpointing import find_repeated_blocks
from autotune.engine.compilation import compiled_graph_count
from autotune.engine.hooks.script import ScriptHooks
from autotune.engine.hooks.steps import ScriptStep
from autotune.engine.memory_format import has_4d_convolution
from autotune.engine.optimizer import current_implementation, read_optimizer_facts
from autotune.engine.precision import allows_tf32
from autotune.probe.facts import find_troubles, supports_bf16
from autotune.probe.limits import measure_ceilings
from autotune.probe.script_data import look_at_data
from autotune.records.config import Precision, TrainConfig
from autotune.records.facts import ModelFacts, OptimizerFacts, StepPhases, TargetFacts
from autotune.records.measurement import Measurement
from autotune.records.script import Script
from autotune.records.trial import TrialSpec
from autotune.space import SPLIT_KNOBS
from autotune.targets.script import own_values, placeholder_names

SYNCHRONIZED_STEPS = 10
"""Steps at whose phases a probe waits for a GPU, so that each phase's time is its own."""

_FIRST_STEADY_STEP = 2
_CEILINGS_SECONDS = 2.0
_MOST_ROOTS = 8


class ScriptProbe:
    """Gathers facts while a script trains.

    Args:
        hooks: on the script.
    """

    def __init__(self, hooks: ScriptHooks) -> None:
        self._hooks = hooks
        self._micro_batches: list[int] = []
        self._samples: list[int] = []
        self._since: tuple[int, float, Counter[str]] | None = None
        self._phases: StepPhases | None = None

    def take(self, step: ScriptStep) -> None:
        """Note a step."""
        steps = self._hooks.steps
        if steps > _FIRST_STEADY_STEP:
            self._micro_batches.append(step.micro_batches)
            self._samples.append(step.samples)
        elif steps == _FIRST_STEADY_STEP:
            self._since = (steps, time.perf_counter(), Counter(self._hooks.timer.seconds))
        if steps == SYNCHRONIZED_STEPS and self._hooks.device.type == "cuda":
            self._phases = self._split_step(0.0)

    def find_facts(
        self, spec: TrialSpec, measurement: Measurement, *, is_seeded: bool, aside_fraction: float
    ) -> TargetFacts:
        """Return the facts about the script; nothing of it runs afterwards."""
        hooks, script = self._hooks, spec.target.script
        assert script is not None
        phases = self._phases or self._split_step(aside_fraction)
        loader = hooks.loaders.training_loader
        baseline = self._read_baseline(script, loader)
        data, fixed, numerics = look_at_data(hooks, loader, baseline)
        fixed |= self._find_fixed(script, baseline)
        model = self._look_at_models(measurement)
        return TargetFacts(
            label=spec.target.spec,
            fingerprint="",  # known to the supervisor, who sees the folder as it was before the script wrote to it
            device="cuda" if hooks.device.type == "cuda" else "cpu",
            baseline=baseline,
            model=model,
            data=data,
            optimizer=look_at_optimizers(hooks.optimizers.optimizers, hooks.device),
            phases=phases,
            compute_seconds_per_step=max(1e-9, measurement.seconds_per_step * (1.0 - measurement.data_wait_fraction)),
            knobs={knob.name: knob.values for knob in script.knobs},
            metrics={metric.name: metric.direction for metric in script.metrics},
            evaluate_seconds=0.0 if script.metrics else None,
            fixed=fixed,
            numerics=numerics
            | {f"user_knobs.{knob.name}": knob.numerics for knob in script.knobs}
            | dict.fromkeys(SPLIT_KNOBS if model.has_batch_norm else (), "semantic"),
            scales_loss=hooks.optimizers.scales_loss,
            training_loaders=tuple(sorted(hooks.watch.training_loaders)),
            aside_fraction=min(1.0, max(0.0, aside_fraction)),
            supports_bf16=supports_bf16(hooks.device),
            ceilings=measure_ceilings(hooks.device, budget_seconds=_CEILINGS_SECONDS),
            warnings=(*_describe_habits(aside_fraction, is_seeded=is_seeded), *find_troubles()),
        )

    def _split_step(self, aside_fraction: float) -> StepPhases:
        if self._since is None:
            return StepPhases(
                data_wait_seconds=0, copy_seconds=0, forward_seconds=0, backward_seconds=0, optimizer_seconds=0
            )
        first, began, before = self._since
        steps = max(1, self._hooks.steps - first)
        whole = (time.perf_counter() - began) * (1.0 - aside_fraction) / steps
        seconds = {name: (value - before[name]) / steps for name, value in self._hooks.timer.seconds.items()}
        return StepPhases(
            data_wait_seconds=seconds.get("data", 0.0),
            copy_seconds=0.0,
            forward_seconds=seconds.get("forward", 0.0),
            backward_seconds=seconds.get("backward", 0.0),
            optimizer_seconds=seconds.get("optimizer", 0.0),
            other_seconds=max(0.0, whole - sum(seconds.values())),
        )

    def _read_baseline(self, script: Script, loader: DataLoader[Any] | None) -> TrainConfig:
        """Return what the script does by itself."""
        own, hooks = own_values(script), self._hooks
        on_gpu = hooks.device.type == "cuda"
        micro_batches = max(1, _most_common(self._micro_batches))
        samples = _most_common(self._samples)
        seen: dict[str, Any] = {
            "gradient_accumulation_steps": micro_batches,
            "micro_batch_size": max(1, samples // micro_batches),
            "precision": _name_precision(hooks.autocast_dtypes),
            "compile_mode": "default" if hooks.models.compiles_itself or compiled_graph_count() > 0 else "off",
            "memory_format": "channels_last" if _is_channels_last(hooks.models.roots) else "contiguous",
            "activation_checkpointing": "full" if _checkpoints(hooks.models.roots) else "off",
            "optimizer_implementation": _read_implementation(hooks.optimizers.optimizers, hooks.device),
            "num_threads": None if on_gpu else torch.get_num_threads(),
            "allow_tf32": on_gpu and allows_tf32(),
            "cudnn_benchmark": on_gpu and torch.backends.cudnn.benchmark,
        }
        if loader is not None:
            seen |= {
                "micro_batch_size": loader.batch_size or seen["micro_batch_size"],
                "num_workers": loader.num_workers,
                "prefetch_factor": loader.prefetch_factor or 2,
                "pin_memory": loader.pin_memory,
                "persistent_workers": loader.persistent_workers,
            }
        fields = {name: value for name, value in own.items() if name in TrainConfig.model_fields}
        return TrainConfig(**(seen | fields), user_knobs={n: v for n, v in own.items() if n not in fields})

    def _look_at_models(self, measurement: Measurement) -> ModelFacts:
        roots, optimizers = self._hooks.models.roots, self._hooks.optimizers.optimizers
        # Not by `requires_grad`: scripts with several models switch it off and on within a step.
        stepped = [p for one in optimizers for group in one.param_groups for p in group["params"]]
        trainable = {id(p): p for p in stepped or [p for root in roots for p in root.parameters()]}.values()
        modules = [module for root in roots for module in root.modules()]
        seen = self._hooks.models.seen
        samples_per_step = measurement.samples / sum(block.optimizer_steps for block in measurement.blocks)
        # A backward pass counts as two forward ones; each model is taken to be called once for each micro batch.
        per_step = 3.0 * seen.flops * max(1, _most_common(self._micro_batches))
        return ModelFacts(
            parameter_count=sum(p.numel() for p in trainable),
            parameter_bytes=sum(p.numel() * p.element_size() for p in trainable),
            has_batch_norm=any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in modules),
            has_4d_convolution=any(has_4d_convolution(root) for root in roots),
            calls_attention=seen.attention,
            checkpointable_blocks=sum(len(find_repeated_blocks(root)) for root in roots),
            flops_per_sample=per_step / samples_per_step if per_step else None,
        )

    def _find_fixed(self, script: Script, baseline: TrainConfig) -> dict[str, str]:
        """Return the model's and the optimizer's knobs that must stay as the script has them, with reasons."""
        hooks, roots, names = self._hooks, self._hooks.models.roots, placeholder_names(script)
        fixed: dict[str, str] = {}
        if not {"micro_batch_size", "gradient_accumulation_steps"} <= names:
            fixed["micro_batch_size"] = (
                "only the script can change it and keep the effective batch: put {micro_batch_size} and "
                "{gradient_accumulation_steps} where its command has flags for them"
            )
        if not roots:
            reason = "the script trains no torch.nn.Module that is called"
            fixed |= dict.fromkeys(
                ("precision", "compile_mode", "memory_format", "activation_checkpointing", "attention_backend"), reason
            )
        if hooks.autocast_dtypes:
            fixed["precision"] = f"the script casts by itself ({baseline.precision})"
        dtypes = {str(p.dtype).removeprefix("torch.") for root in roots for p in root.parameters() if p.requires_grad}
        if dtypes - {"float32"}:
            fixed["precision"] = f"its parameters are {' and '.join(sorted(dtypes))}"
        if baseline.compile_mode != "off":
            fixed["compile_mode"] = "the script compiles its model by itself"
        elif len(roots) > _MOST_ROOTS:
            fixed["compile_mode"] = f"the script calls {len(roots)} modules one by one, not one model"
        if baseline.memory_format == "channels_last":
            fixed["memory_format"] = "the script lays its model out itself"
        elif any(isinstance(root, DistributedDataParallel) for root in roots):
            fixed["memory_format"] = "DistributedDataParallel has laid its buckets out already"
        if baseline.activation_checkpointing != "off":
            fixed["activation_checkpointing"] = "the script checkpoints by itself"
        return {name: reason for name, reason in fixed.items() if name not in names or name == "micro_batch_size"}


def look_at_optimizers(optimizers: list[Optimizer], device: torch.device) -> OptimizerFacts:
    """Return what all optimizers of a script let be changed."""
    if not optimizers:
        return OptimizerFacts(name="none", implementations=(), reason="the script steps without an optimizer object")
    found = [read_optimizer_facts(optimizer, device) for optimizer in optimizers]
    common = [name for name in found[0].implementations if all(name in one.implementations for one in found)]
    names = " and ".join(dict.fromkeys(one.name for one in found))
    reason = next((one.reason for one in found if one.reason), "")
    return OptimizerFacts(name=names, implementations=tuple(common), reason=reason)


def _read_implementation(optimizers: list[Optimizer], device: torch.device) -> str | None:
    found = {current_implementation(optimizer, device) for optimizer in optimizers}
    return found.pop() if len(found) == 1 else None


def _most_common(values: list[int]) -> int:
    return Counter(values).most_common(1)[0][0] if values else 1


def _name_precision(dtypes: set[torch.dtype]) -> Precision:
    return "fp16" if torch.float16 in dtypes else "bf16" if torch.bfloat16 in dtypes else "fp32"


def _is_channels_last(roots: list[nn.Module]) -> bool:
    weights = [p for root in roots for p in root.parameters() if p.ndim == 4 and p.shape[1] > 1 and p[0, 0].numel() > 1]
    return bool(weights) and all(p.is_contiguous(memory_format=torch.channels_last) for p in weights)


def _checkpoints(roots: list[nn.Module]) -> bool:
    return any(bool(getattr(module, "gradient_checkpointing", False)) for root in roots for module in root.modules())


def _describe_habits(aside_fraction: float, *, is_seeded: bool) -> list[str]:
    sentences = []
    if not is_seeded:
        sentences.append("the script sets no seed: all trials are given the same one; your own runs are left without")
    if aside_fraction > 0.1:
        share = f"{100 * aside_fraction:.0f} %"
        sentences.append(f"{share} of the time goes to validation and the like, which faster steps do not shorten")
    return sentences
