from __future__ import annotations

import ast
import importlib
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from autotune.emit.export import EXPORTERS, Export, export_config
from autotune.emit.export.hf_trainer import export_hf_trainer
from autotune.emit.export.snippet import export_snippet
from autotune.errors import UsageError
from autotune.records import TrainConfig, changed_fields
from autotune.records import config as knobs

HOSTILE = 'a"b\'; import os\n# \u2028"""\x1b[31m{{ 7 * 7 }}'
OTHER_VALUES: dict[str, Any] = {
    "micro_batch_size": 48,
    "gradient_accumulation_steps": 3,
    "learning_rate_scale": 1.5,
    "precision": "bf16",
    "allow_tf32": True,
    "activation_checkpointing": "full",
    "compile_mode": "max-autotune",
    "optimizer_implementation": "fused",
    "memory_format": "channels_last",
    "attention_backend": "flash",
    "cudnn_benchmark": True,
    "num_threads": 7,
    "host_allocator": "glibc-tuned",
    "device_allocator": "expandable-segments",
    "num_workers": 5,
    "prefetch_factor": 9,
    "pin_memory": True,
    "persistent_workers": True,
    "non_blocking": True,
    "user_knobs": {"lr": 0.001},
}
# Two workers: without any, prefetch and persistence have no effect to export.
PLAIN = TrainConfig(num_workers=2)
CHANGED = TrainConfig(**OTHER_VALUES)

configs = st.builds(
    TrainConfig,
    micro_batch_size=st.integers(1, 512),
    gradient_accumulation_steps=st.integers(1, 16),
    precision=st.sampled_from(get_args(knobs.Precision)),
    allow_tf32=st.booleans(),
    activation_checkpointing=st.sampled_from(get_args(knobs.ActivationCheckpointing)),
    compile_mode=st.sampled_from(get_args(knobs.CompileMode)),
    optimizer_implementation=st.sampled_from([None, *get_args(knobs.OptimizerImplementation)]),
    memory_format=st.sampled_from(get_args(knobs.MemoryFormat)),
    attention_backend=st.sampled_from(get_args(knobs.AttentionBackend)),
    cudnn_benchmark=st.booleans(),
    num_threads=st.none() | st.integers(1, 64),
    host_allocator=st.sampled_from(get_args(knobs.HostAllocator)),
    device_allocator=st.sampled_from(get_args(knobs.DeviceAllocator)),
    num_workers=st.integers(0, 8),
    prefetch_factor=st.integers(1, 8),
    pin_memory=st.booleans(),
    persistent_workers=st.booleans(),
    non_blocking=st.booleans(),
    user_knobs=st.dictionaries(
        st.text(max_size=20),
        st.text(max_size=20) | st.integers() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False),
        max_size=3,
    ),
)


def run_source(text: str) -> dict[str, Any]:
    """Run generated Python without its `__main__` part and return its names."""
    names: dict[str, Any] = {"__name__": "generated"}
    exec(compile(text, "generated.py", "exec"), names)
    return names


# ---- the contract of all exporters


@pytest.mark.parametrize("name", EXPORTERS)
@settings(max_examples=60, deadline=None)
@given(config=configs)
def test_every_knob_is_mapped_or_explained(name: str, config: TrainConfig) -> None:
    export = export_config(config, name)
    assert sorted([*export.mapped, *export.unmapped]) == sorted(TrainConfig.model_fields)
    assert list(export.unmapped) == [field for field in TrainConfig.model_fields if field in export.unmapped]
    for reason in export.unmapped.values():
        assert reason.endswith(".")
        assert reason.isprintable()
    assert export.text.endswith("\n")
    assert export.text.isascii()


@pytest.mark.parametrize("name", EXPORTERS)
@pytest.mark.parametrize("field", OTHER_VALUES)
def test_no_change_of_a_knob_is_lost(name: str, field: str) -> None:
    export = export_config(PLAIN, name)
    other = export_config(PLAIN.replace(**{field: OTHER_VALUES[field]}), name)
    if field in export.mapped and field in other.mapped:
        assert _without_comments(export.text) != _without_comments(other.text)
    else:
        assert export.unmapped.get(field) != other.unmapped.get(field)


def _without_comments(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("#   ")]


def test_other_values_cover_every_knob() -> None:
    assert OTHER_VALUES.keys() == TrainConfig.model_fields.keys()
    assert len(changed_fields(CHANGED, TrainConfig())) == len(OTHER_VALUES)


@pytest.mark.parametrize("name", EXPORTERS)
def test_comments_list_what_the_user_must_do(name: str) -> None:
    export = export_config(CHANGED, name)
    if name == "deepspeed":
        assert "#" not in export.text
        return
    for field, reason in export.unmapped.items():
        assert f"#   {field}: {reason}\n" in export.text


def test_what_each_format_lacks_is_exact() -> None:
    loader = {"num_workers", "prefetch_factor", "pin_memory", "persistent_workers"}
    model = {"memory_format", "attention_backend"}
    code = {"allow_tf32", "cudnn_benchmark", "optimizer_implementation", "activation_checkpointing", "non_blocking"}
    environment = {"num_threads", "host_allocator", "device_allocator"}
    own = {"user_knobs", "learning_rate_scale"}
    expected = {
        "torch": set(),
        "hf": model | own,
        "lightning": model | own | {"activation_checkpointing"},
        "accelerate": model | loader | code | own | {"micro_batch_size", "gradient_accumulation_steps"},
        "deepspeed": model | loader | code | environment | own | {"compile_mode"},
    }
    assert {name: set(export_config(CHANGED, name).unmapped) for name in EXPORTERS} == expected


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(UsageError) as caught:
        export_config(PLAIN, "keras")
    assert "'keras'" in caught.value.message
    assert caught.value.hint == "choose one of torch, hf, lightning, accelerate, deepspeed"


def test_an_export_is_frozen() -> None:
    export = export_config(PLAIN, "torch")
    with pytest.raises(ValueError, match="frozen"):
        export.text = ""  # type: ignore[misc]


@pytest.mark.parametrize("name", ["torch", "hf", "lightning", "accelerate"])
def test_allocators_stand_in_the_line_to_start_with(name: str) -> None:
    config = PLAIN.replace(host_allocator="glibc-tuned", device_allocator="expandable-segments")
    (line,) = (line for line in export_config(config, name).text.splitlines() if line.startswith("# run as: "))
    start = "# run as: MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=1073741824 "
    assert line.startswith(start + "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True ")
    assert line.endswith(".py")


TOO = "${LD_PRELOAD:+:$LD_PRELOAD}"
"""What a shell puts there: what the user preloads already."""
MEASURED = {"jemalloc": "/usr/lib/x/libjemalloc.so.2", "tcmalloc": "/opt/lib/libtcmalloc.so.4"}


@pytest.mark.parametrize("value", MEASURED)
@pytest.mark.parametrize("name", ["torch", "hf", "lightning", "accelerate"])
def test_the_library_that_was_measured_is_preloaded(name: str, value: str) -> None:
    export = export_config(PLAIN.replace(host_allocator=value), name, host_allocators=MEASURED)
    (line,) = (line for line in export.text.splitlines() if "LD_PRELOAD" in line)
    assert line.startswith(f"# run as: LD_PRELOAD={MEASURED[value]}{TOO} ")
    assert "ldconfig" not in export.text


@pytest.mark.parametrize(
    ("value", "library", "package"),
    [
        ("jemalloc", "libjemalloc.so.2", "libjemalloc2"),
        ("tcmalloc", "libtcmalloc_minimal.so.4", "libtcmalloc-minimal4"),
    ],
)
def test_a_library_whose_path_is_not_known_goes_by_the_name_that_its_package_has(
    value: str, library: str, package: str
) -> None:
    config = PLAIN.replace(host_allocator=value)
    text = export_config(config, "torch", host_allocators={"other": "/lib/o.so"}).text
    assert f"# run as: LD_PRELOAD={library}{TOO} python train_tuned.py\n# {library} is in the package {package}" in text
    told = export_config(config, "deepspeed").unmapped["host_allocator"]
    assert f"LD_PRELOAD={library}{TOO} ({library} is in the package {package}" in told
    assert f"ldconfig -p | grep {value}" in told
    measured = export_config(config, "deepspeed", host_allocators=MEASURED).unmapped["host_allocator"]
    assert measured.endswith(f": start the process with LD_PRELOAD={MEASURED[value]}{TOO}.")


@pytest.mark.parametrize("own", ["", "/lib/libown.so"])
def test_a_shell_extends_what_is_preloaded_already(own: str) -> None:
    text = export_config(PLAIN.replace(host_allocator="tcmalloc"), "torch", host_allocators=MEASURED).text
    (line,) = (line for line in text.splitlines() if line.startswith("# run as: "))
    start = line.removeprefix("# run as: ").removesuffix(" python train_tuned.py")
    shell = ["sh", "-c", f'LD_PRELOAD="{own}"; {start}; printf %s "$LD_PRELOAD"']
    printed = subprocess.run(shell, capture_output=True, text=True, check=True, timeout=60).stdout
    assert printed == MEASURED["tcmalloc"] + (f":{own}" if own else "")


@pytest.mark.parametrize(
    "path", ["/lib/a b.so", "/lib/x.so\nimport os", "lib.so", "/lib/$(id).so", "/lib/`id`.so", "/l;id"]
)
@pytest.mark.parametrize("name", EXPORTERS)
def test_a_path_that_a_shell_would_read_is_not_repeated(name: str, path: str) -> None:
    export = export_config(PLAIN.replace(host_allocator="tcmalloc"), name, host_allocators={"tcmalloc": path})
    assert export == export_config(PLAIN.replace(host_allocator="tcmalloc"), name)


@pytest.mark.parametrize("name", ["torch", "hf", "lightning"])
@settings(max_examples=30, deadline=None)
@given(config=configs)
def test_generated_python_parses(name: str, config: TrainConfig) -> None:
    ast.parse(export_config(config, name).text)


@pytest.mark.parametrize("name", EXPORTERS)
@pytest.mark.fault("37", injected="code in names and values of knobs, exported", outcome="quoted; nothing is run")
def test_hostile_knobs_stay_data(name: str) -> None:
    export = export_config(PLAIN.replace(user_knobs={HOSTILE: HOSTILE}), name)
    assert "\x1b" not in export.text
    assert not any(line.lstrip().startswith("import os") for line in export.text.splitlines())
    if name in ("torch", "hf", "lightning"):
        names = run_source(export.text)
        assert "os" not in names
        assert name != "torch" or names["USER_KNOBS"] == {HOSTILE: HOSTILE}


# ---- transformers


def hf_arguments(config: TrainConfig) -> dict[str, Any]:
    arguments: dict[str, Any] = run_source(export_hf_trainer(config, {}).text)["training_arguments"]
    return arguments


@pytest.fixture
def torch_settings() -> Iterator[None]:
    before = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    yield
    torch.set_num_threads(before[0])
    torch.set_float32_matmul_precision(before[1])
    torch.backends.cudnn.benchmark = before[2]


@pytest.mark.usefixtures("torch_settings")
def test_hf_names_and_values() -> None:
    assert hf_arguments(CHANGED) == {
        "per_device_train_batch_size": 48,
        "gradient_accumulation_steps": 3,
        "bf16": True,
        "fp16": False,
        "tf32": True,
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False},
        "torch_compile": True,
        "torch_compile_backend": "inductor",
        "torch_compile_mode": "max-autotune",
        "optim": "adamw_torch_fused",
        "dataloader_num_workers": 5,
        "dataloader_prefetch_factor": 9,
        "dataloader_pin_memory": True,
        "dataloader_persistent_workers": True,
        "accelerator_config": {"non_blocking": True},
    }
    assert torch.get_num_threads() == 7
    assert torch.backends.cudnn.benchmark is True


@pytest.mark.usefixtures("torch_settings")
def test_hf_writes_defaults_out() -> None:
    assert hf_arguments(TrainConfig(optimizer_implementation="foreach")) == {
        "per_device_train_batch_size": 32,
        "gradient_accumulation_steps": 1,
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "activation_checkpointing": False,
        "torch_compile": False,
        "optim": "adamw_torch",
        "dataloader_num_workers": 0,
        "dataloader_prefetch_factor": None,
        "dataloader_pin_memory": False,
        "dataloader_persistent_workers": False,
        "accelerator_config": {"non_blocking": False},
    }


def test_hf_does_not_write_persistent_workers_without_workers() -> None:
    arguments = hf_arguments(TrainConfig(persistent_workers=True))
    assert arguments["dataloader_persistent_workers"] is False


@pytest.mark.parametrize(
    ("implementation", "optim", "mapped"),
    [
        ("fused", "adamw_torch_fused", True),
        ("foreach", "adamw_torch", False),
        ("for-loop", "adamw_torch", False),
        (None, None, False),
    ],
)
def test_hf_optimizer(implementation: Any, optim: str | None, mapped: bool) -> None:
    config = PLAIN.replace(optimizer_implementation=implementation)
    assert hf_arguments(config).get("optim") == optim
    assert ("optimizer_implementation" in export_hf_trainer(config, {}).mapped) is mapped


def test_hf_cannot_checkpoint_selectively() -> None:
    export = export_hf_trainer(PLAIN.replace(activation_checkpointing="selective"), {})
    assert "activation_checkpointing" in export.unmapped
    assert run_source(export.text)["training_arguments"]["activation_checkpointing"] is False


def install_fake_transformers(folder: Path, fields: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = folder / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('the exporter must not import transformers')")
    (package / "training_args.py").write_text(f"class TrainingArguments:\n{fields}")
    info = folder / "transformers-4.57.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.57.1\n")
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()


def test_hf_takes_the_old_name_from_an_old_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_transformers(tmp_path, "    gradient_checkpointing: bool = False\n", monkeypatch)
    export = export_hf_trainer(PLAIN.replace(activation_checkpointing="full"), {})
    arguments = run_source(export.text)["training_arguments"]
    assert export.text.startswith("# Measured by autotune, for transformers 4.57.1\n")
    assert arguments["gradient_checkpointing"] is True
    assert arguments["gradient_checkpointing_kwargs"] == {"use_reentrant": False}
    assert not any(name.startswith("activation") for name in arguments)


def test_hf_takes_the_new_name_where_there_are_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = "    activation_checkpointing: bool = False\n    gradient_checkpointing: bool = False\n"
    install_fake_transformers(tmp_path, fields, monkeypatch)
    arguments = run_source(export_hf_trainer(PLAIN, {}).text)["training_arguments"]
    assert "activation_checkpointing" in arguments
    assert "gradient_checkpointing" not in arguments


@pytest.mark.parametrize("source", ["def broken(", "class Other:\n    x: int = 1\n"])
def test_hf_falls_back_to_the_newest_names(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_transformers(tmp_path, "    x: int = 1\n", monkeypatch)
    (tmp_path / "transformers" / "training_args.py").write_text(source)
    assert '"activation_checkpointing"' in export_hf_trainer(PLAIN, {}).text


# ---- Lightning, Accelerate, DeepSpeed


@pytest.mark.usefixtures("torch_settings")
def test_lightning_names_and_values() -> None:
    names = run_source(export_config(CHANGED.replace(compile_mode="off"), "lightning").text)
    assert names["trainer_arguments"] == {"accumulate_grad_batches": 3, "precision": "bf16-mixed", "benchmark": True}
    assert names["loader_arguments"] == {
        "batch_size": 48,
        "num_workers": 5,
        "prefetch_factor": 9,
        "pin_memory": True,
        "persistent_workers": True,
    }
    assert names["optimizer_arguments"] == {"foreach": False, "fused": True}
    model = nn.Linear(2, 2)
    assert names["prepare_model"](model) is model
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_num_threads() == 7


@pytest.mark.usefixtures("torch_settings")
@pytest.mark.parametrize("config", [TrainConfig(persistent_workers=True), PLAIN, PLAIN.replace(prefetch_factor=5)])
def test_lightning_arguments_are_accepted_by_torch(config: TrainConfig) -> None:
    names = run_source(export_config(config, "lightning").text)
    torch.utils.data.DataLoader(TensorDataset(torch.zeros(4, 2)), **names["loader_arguments"])
    for implementation in get_args(knobs.OptimizerImplementation):
        own = run_source(export_config(config.replace(optimizer_implementation=implementation), "lightning").text)
        torch.optim.AdamW([nn.Parameter(torch.ones(2))], **own["optimizer_arguments"])


@pytest.mark.parametrize(("precision", "name"), [("fp32", "32-true"), ("bf16", "bf16-mixed"), ("fp16", "16-mixed")])
def test_lightning_precision(precision: Any, name: str) -> None:
    text = export_config(PLAIN.replace(precision=precision), "lightning").text
    assert f'"precision": "{name}"' in text


@pytest.mark.usefixtures("torch_settings")
@pytest.mark.parametrize(("mode", "arguments"), [("default", {}), ("reduce-overhead", {"mode": "reduce-overhead"})])
def test_lightning_compiles(mode: Any, arguments: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda model, **given: seen.append((model, given)))
    run_source(export_config(PLAIN.replace(compile_mode=mode), "lightning").text)["prepare_model"]("model")
    assert seen == [("model", arguments)]


def read_yaml(text: str) -> Any:
    return pytest.importorskip("yaml").safe_load(text)


@pytest.mark.parametrize(("precision", "name"), [("fp32", "no"), ("bf16", "bf16"), ("fp16", "fp16")])
def test_accelerate_names_and_values(precision: Any, name: str) -> None:
    plain = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "num_machines": 1,
        "num_processes": 1,
        "mixed_precision": name,
    }
    config = PLAIN.replace(precision=precision)
    assert read_yaml(export_config(config, "accelerate").text) == plain | {"dynamo_config": {"dynamo_backend": "NO"}}
    compiled = read_yaml(export_config(config.replace(compile_mode="max-autotune"), "accelerate").text)
    assert compiled == plain | {
        "dynamo_config": {
            "dynamo_backend": "INDUCTOR",
            "dynamo_mode": "max-autotune",
            "dynamo_use_fullgraph": False,
            "dynamo_use_dynamic": False,
        }
    }


def test_accelerate_threads_go_to_the_environment() -> None:
    export = export_config(PLAIN.replace(num_threads=6), "accelerate")
    line = "# run as: OMP_NUM_THREADS=6 accelerate launch --config_file accelerate.yaml train.py\n"
    assert line in export.text
    assert export.filename == "accelerate.yaml"
    assert "num_threads" in export_config(PLAIN, "accelerate").unmapped


@pytest.mark.parametrize(
    ("precision", "autocast"),
    [
        ("fp32", {"enabled": False}),
        ("bf16", {"enabled": True, "dtype": "bfloat16"}),
        ("fp16", {"enabled": True, "dtype": "float16"}),
    ],
)
def test_deepspeed_names_and_values(precision: Any, autocast: dict[str, Any]) -> None:
    text = export_config(CHANGED.replace(precision=precision), "deepspeed").text
    assert json.loads(text) == {
        "train_micro_batch_size_per_gpu": 48,
        "gradient_accumulation_steps": 3,
        "torch_autocast": autocast,
        "zero_optimization": {"stage": 0},
    }


def test_instructions_are_what_torch_accepts() -> None:
    # PyTorch refuses a prefetch factor and persistent workers where there are no workers.
    reasons = export_config(TrainConfig(persistent_workers=True), "deepspeed").unmapped
    assert "prefetch_factor=None" in reasons["prefetch_factor"]
    assert "persistent_workers=False" in reasons["persistent_workers"]


# ---- the torch snippet runs


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended = nn.functional.scaled_dot_product_attention(x[:, None, None], x[:, None, None], x[:, None, None])
        return torch.relu(self.linear(attended[:, 0, 0])) + x


class Tiny:
    """A workload small enough to run in milliseconds; it notes what it sees."""

    lr = 0.01

    def __init__(self, samples: int = 10) -> None:
        self.samples = samples
        self.seen: list[Any] = []

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(8, 1))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr)

    def train_dataset(self) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(self.samples, 8, generator=generator)
        return TensorDataset(x, x.sum(1, keepdim=True))

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        self.seen.append((len(x), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return nn.functional.mse_loss(model(x).float(), y)


def run_snippet(config: TrainConfig, workload: Any, *, epochs: int = 1) -> tuple[nn.Module, list[float]]:
    names = run_source(export_snippet(config, {}).text)
    model, losses = names["train"](workload, epochs=epochs, device="cpu")
    return model, losses


def reference_losses(config: TrainConfig, workload: Tiny) -> list[float]:
    """Train one epoch by the book: one forward pass of each effective batch, the snippet's own order."""
    torch.manual_seed(0)
    model = workload.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.lr)
    dataset: Any = workload.train_dataset()
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=config.effective_batch_size, shuffle=True, generator=torch.Generator().manual_seed(0)
    )
    losses = []
    for batch in loader:
        loss = workload.compute_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.usefixtures("torch_settings")
@settings(max_examples=25, deadline=None)
@given(micro=st.integers(1, 5), accumulation=st.integers(1, 4), samples=st.integers(1, 17))
def test_accumulation_is_the_large_batch(micro: int, accumulation: int, samples: int) -> None:
    config = TrainConfig(micro_batch_size=micro, gradient_accumulation_steps=accumulation)
    _, losses = run_snippet(config, Tiny(samples))
    expected = reference_losses(config, Tiny(samples))
    assert len(losses) == math.ceil(samples / (micro * accumulation))
    assert losses == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.usefixtures("torch_settings")
def test_returned_counts_weigh_the_micro_batches() -> None:
    class Weighted(Tiny):
        lr = 1.0

        def build_model(self) -> nn.Module:
            return nn.Linear(1, 1, bias=False)

        def train_dataset(self) -> Dataset[Any]:
            return TensorDataset(torch.tensor([[1.0], [2.0], [4.0]]))

        shuffle = False

        def compute_loss(self, model: nn.Module, batch: Any) -> Any:
            (x,) = batch
            return model(torch.ones(1, 1)).sum() * x.item(), x.item()

    config = TrainConfig(micro_batch_size=1, gradient_accumulation_steps=3)
    torch.manual_seed(0)
    start = nn.Linear(1, 1, bias=False).weight.item()
    model, losses = run_snippet(config, Weighted())
    # d loss / d w is the mean of x weighted by x: (1 + 4 + 16) / 7 = 3.
    assert model.get_parameter("weight").item() == pytest.approx(start - 3.0)
    assert losses == [pytest.approx(3.0 * start)]


ROUNDING: dict[str, Any] = {
    "precision": "bf16",
    "activation_checkpointing": "selective",
    "optimizer_implementation": "fused",
    "attention_backend": "math",
    "memory_format": "channels_last",
    "cudnn_benchmark": True,
    "num_threads": 1,
    "num_workers": 1,
    "persistent_workers": True,
    "non_blocking": True,
    "pin_memory": True,
    "allow_tf32": True,
    "compile_mode": "default",
}


@pytest.mark.usefixtures("torch_settings")
@pytest.mark.parametrize("field", [field for field in ROUNDING if field != "compile_mode"])
def test_each_knob_runs_and_learns_the_same(field: str) -> None:
    config = TrainConfig(micro_batch_size=4)
    _, expected = run_snippet(config, Tiny(), epochs=2)
    _, losses = run_snippet(config.replace(**{field: ROUNDING[field]}), Tiny(), epochs=2)
    assert losses == pytest.approx(expected, rel=0.05 if field == "precision" else 1e-4)


@pytest.mark.usefixtures("torch_settings")
def test_all_knobs_run_together() -> None:
    config = TrainConfig(micro_batch_size=2, gradient_accumulation_steps=2, **(ROUNDING | {"compile_mode": "off"}))
    _, losses = run_snippet(config, Tiny(), epochs=2)
    assert len(losses) == 6
    assert all(math.isfinite(loss) for loss in losses)
    assert torch.get_num_threads() == 1
    assert torch.backends.cudnn.benchmark is True


@pytest.mark.usefixtures("torch_settings")
@pytest.mark.parametrize(
    ("precision", "enabled", "dtype"),
    [("fp32", False, None), ("bf16", True, torch.bfloat16), ("fp16", True, torch.float16)],
)
def test_precision_reaches_the_forward_pass(precision: Any, enabled: bool, dtype: Any) -> None:
    workload = Tiny()
    run_snippet(TrainConfig(micro_batch_size=5, precision=precision), workload)
    assert [entry[1] for entry in workload.seen] == [enabled, enabled]
    assert dtype is None or workload.seen[0][2] is dtype


@pytest.mark.usefixtures("torch_settings")
@pytest.mark.parametrize(("precision", "enabled"), [("fp32", False), ("bf16", False), ("fp16", True)])
def test_only_fp16_scales_its_loss(precision: Any, enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[dict[str, Any]] = []
    real = torch.amp.GradScaler

    def build(*args: Any, **kwargs: Any) -> Any:
        built.append(kwargs)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.amp, "GradScaler", build)
    run_snippet(TrainConfig(precision=precision), Tiny())
    assert built == [{"enabled": enabled}]


@pytest.mark.usefixtures("torch_settings")
@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_compilation_is_asked_of_the_model(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **given: asked.append(given))
    run_snippet(TrainConfig(compile_mode=mode), Tiny())
    assert asked == [{} if mode == "default" else {"mode": mode}]


@pytest.mark.usefixtures("torch_settings")
def test_attention_is_restricted_to_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watching(Tiny):
        def compute_loss(self, model: nn.Module, batch: Any) -> Any:
            self.seen.append((torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()))
            return super().compute_loss(model, batch)

    workload = Watching(4)
    run_snippet(TrainConfig(attention_backend="math"), workload)
    assert workload.seen[0] == (True, False)
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.usefixtures("torch_settings")
@pytest.mark.parametrize("implementation", get_args(knobs.OptimizerImplementation))
def test_optimizer_implementation_is_set(implementation: Any) -> None:
    class Keeping(Tiny):
        def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            self.optimizer = super().build_optimizer(model)
            return self.optimizer

    workload = Keeping()
    run_snippet(TrainConfig(optimizer_implementation=implementation), workload)
    (group,) = workload.optimizer.param_groups
    assert (group["fused"], group["foreach"]) == (implementation == "fused", implementation == "foreach")


@pytest.mark.usefixtures("torch_settings")
def test_channels_last_reaches_weights_and_inputs() -> None:
    class Convolution(Tiny):
        def build_model(self) -> nn.Module:
            return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 1))

        def train_dataset(self) -> Dataset[Any]:
            return TensorDataset(torch.randn(6, 3, 4, 4), torch.randn(6, 1))

        def compute_loss(self, model: Any, batch: Any) -> Any:
            x, y = batch
            laid_out = [t.is_contiguous(memory_format=torch.channels_last) for t in (x, model[0].weight)]
            self.seen.append(laid_out)
            return nn.functional.mse_loss(model(x), y)

    workload = Convolution()
    run_snippet(TrainConfig(memory_format="channels_last"), workload)
    assert workload.seen == [[True, True]]


@pytest.mark.usefixtures("torch_settings")
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_checkpointing_recomputes_the_blocks(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"block": 0}
    plain = Block.forward

    def count(self: Block, x: torch.Tensor) -> torch.Tensor:
        calls["block"] += 1
        return plain(self, x)

    monkeypatch.setattr(Block, "forward", count)
    run_snippet(TrainConfig(activation_checkpointing=kind), Tiny(4))
    assert calls["block"] == 4  # two blocks, forward and again in the backward pass


def test_selective_checkpointing_keeps_matrix_products_only() -> None:
    keep = run_source(export_snippet(TrainConfig(activation_checkpointing="selective"), {}).text)["keep_dear"]
    policy = torch.utils.checkpoint.CheckpointPolicy
    assert keep(None, torch.ops.aten.mm.default) is policy.MUST_SAVE
    assert keep(None, torch.ops.aten.relu.default) is policy.PREFER_RECOMPUTE


@pytest.mark.usefixtures("torch_settings")
def test_checkpointing_without_blocks_is_refused() -> None:
    workload = SimpleNamespace(build_model=lambda: nn.Linear(2, 1))
    with pytest.raises(ValueError, match="no repeated blocks"):
        run_snippet(TrainConfig(activation_checkpointing="full"), workload)


@pytest.mark.usefixtures("torch_settings")
def test_gradients_are_clipped_after_unscaling() -> None:
    class Clipped(Tiny):
        gradient_clip_norm = 0.001

        def compute_loss(self, model: nn.Module, batch: Any) -> Any:
            return super().compute_loss(model, batch) * 0.01  # small enough for the scaler's first scale

    moved = []
    for precision in ("fp32", "fp16"):
        config = TrainConfig(micro_batch_size=10, precision=precision)
        model, _ = run_snippet(config, Clipped())
        before = _fresh(Tiny())
        moved.append(sum((value - before[name]).square().sum().item() for name, value in model.state_dict().items()))
    # Far above the limit, so the step is lr x limit long in either precision.
    assert moved == pytest.approx([(0.01 * 0.001) ** 2] * 2, rel=0.02)


@pytest.mark.usefixtures("torch_settings")
def test_own_knobs_scheduler_clipping_and_drop_last() -> None:
    class Full(Tiny):
        gradient_clip_norm = 1e-9
        drop_last = True

        def build_scheduler(self, optimizer: Any) -> Any:
            self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
            return self.scheduler

    workload = Full(10)
    before = {k: v.clone() for k, v in _fresh(workload).items()}
    config = TrainConfig(micro_batch_size=4, user_knobs={"lr": 0.25})
    model, losses = run_snippet(config, workload)
    assert workload.lr == 0.25
    assert len(losses) == 2  # 4 + 4; the last two samples are left out
    assert workload.scheduler.last_epoch == 2
    for name, value in model.state_dict().items():
        assert torch.allclose(value, before[name], atol=1e-8)


def _fresh(workload: Tiny) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return workload.build_model().state_dict()


@pytest.mark.usefixtures("torch_settings")
def test_a_set_smaller_than_a_step_is_still_trained_on() -> None:
    workload = Tiny(3)
    workload.drop_last = True  # type: ignore[attr-defined]
    _, losses = run_snippet(TrainConfig(micro_batch_size=8), workload)
    assert len(losses) == 1


@pytest.mark.usefixtures("torch_settings")
def test_nested_batches_are_moved() -> None:
    names = run_source(export_snippet(PLAIN, {}).text)
    batch = {"x": [torch.ones(2), "text"], "y": (torch.zeros(3),)}
    moved = names["move"](batch, torch.device("meta"))
    assert moved["x"][0].device.type == "meta"
    assert moved["x"][1] == "text"
    assert moved["y"][0].device.type == "meta"
    assert names["count_samples"]({"name": "n", "scalar": torch.tensor(1), "x": [torch.ones(5, 2)]}) == 5


def test_the_export_is_data(tmp_path: Path) -> None:
    export = export_config(CHANGED, "torch")
    assert Export.model_validate_json(export.to_json()) == export
