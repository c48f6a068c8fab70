"""Every form of an answer: what it sets, what it leaves to be written by hand, and that it stays data."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.utils.checkpoint
from emit_records import BASELINE, TUNED, make_profile
from exported_source import CHANGED, OTHER_VALUES, PLAIN, ask, read_call, run_source
from hypothesis import given, settings
from hypothesis import strategies as st
from process_group import joined_alone

from autotune.emit.export import EXPORTERS, Export, export_profile
from autotune.emit.export.by_hand import list_lines
from autotune.emit.export.header import list_header
from autotune.errors import UsageError
from autotune.records import Profile, TrainConfig, changed_fields
from autotune.records import config as knobs
from autotune.records.config import SHARED_KNOBS
from autotune.records.profile import ProfileTarget

HOSTILE = 'a"b\'; import os\n# \u2028"""\x1b[31m{{ 7 * 7 }}'
WITHOUT_COMMENTS = ("hf", "hf-flags")

configs = st.builds(
    TrainConfig,
    micro_batch_size=st.integers(1, 512),
    gradient_accumulation_steps=st.integers(1, 16),
    precision=st.sampled_from(get_args(knobs.Precision)),
    matmul_precision=st.sampled_from(("highest", "high", "medium")),
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
    distributed_strategy=st.sampled_from(get_args(knobs.DistributedStrategy)),
    bucket_cap_mb=st.integers(1, 500),
    gradient_as_bucket_view=st.booleans(),
    static_graph=st.booleans(),
    reshard_after_forward=st.booleans(),
    sync_each_micro_batch=st.booleans(),
    reduce_dtype=st.sampled_from(get_args(knobs.ReduceDtype)),
    user_knobs=st.dictionaries(
        st.text(max_size=20),
        st.text(max_size=20) | st.integers() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False),
        max_size=3,
    ),
)


def export(config: TrainConfig, to: str, baseline: TrainConfig = PLAIN, **changes: Any) -> Export:
    return EXPORTERS[to](ask(config, baseline, **changes))


def make_script_profile(**changes: Any) -> Profile:
    target = ProfileTarget(label="python train.py --epochs 3", fingerprint="0123456789ab")
    return make_profile(target=target, **changes)


# ---- the processes and the device that were measured


def test_a_batch_is_that_of_each_process() -> None:
    two = make_profile(world_size=2, baseline_config=PLAIN, config=PLAIN.replace(micro_batch_size=16, precision="bf16"))
    assert two.config.effective_batch_size == 16
    fields = json.loads(export_profile(two, "deepspeed").text)
    assert fields["train_micro_batch_size_per_gpu"] * fields["gradient_accumulation_steps"] == 8
    arguments = json.loads(export_profile(two, "hf").text)
    assert arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"] == 8
    alone = export_profile(two, "torch").text
    assert "MICRO_BATCH_SIZE = 8\nGRADIENT_ACCUMULATION_STEPS = 2" in alone
    assert "This loop is one process, with the effective batch of all 2." in alone


def test_processes_of_a_scripts_own_launcher_are_written() -> None:
    target = ProfileTarget(
        label="accelerate launch --num_processes 2 train.py", fingerprint="0123456789ab", launched_processes=2
    )
    made = export_profile(make_profile(target=target), "accelerate")
    assert read_yaml(made.text)["num_processes"] == 2
    assert "Measured with 2 processes; the batch is that of each." in made.text


def test_what_was_measured_on_the_cpu_of_a_machine_with_a_gpu_is_written_for_the_cpu() -> None:
    profile = make_profile()
    assert profile.hardware.gpus
    config = profile.config.replace(matmul_precision="medium")
    there = profile.replace(target=profile.target.replace(device="cpu"), config=config)
    assert json.loads(export_profile(there, "hf").text)["use_cpu"] is True
    text = export_profile(there, "torch").text
    assert 'device="cpu"' in text
    assert '    torch.set_float32_matmul_precision("medium")' in text.splitlines()


# ---- the contract of all forms


@pytest.mark.parametrize("is_script", [True, False])
@pytest.mark.parametrize("name", EXPORTERS)
@settings(max_examples=15, deadline=None)
@given(config=configs, baseline=configs)
def test_every_change_is_mapped_or_written_by_hand(
    name: str, is_script: bool, config: TrainConfig, baseline: TrainConfig
) -> None:
    made = export(config, name, baseline, is_script=is_script)
    changed = {field.partition(".")[0] for field in changed_fields(config, baseline)}
    assert sorted([*made.mapped, *made.unmapped]) == sorted(changed)
    for line in made.unmapped.values():
        assert line.isprintable()
        ast.parse(line)
    shown = "\n".join([made.text, *made.aside])
    assert made.text.endswith("\n")
    assert shown.isascii()


@pytest.mark.parametrize("name", EXPORTERS)
def test_no_change_of_a_knob_is_lost(name: str) -> None:
    same = export(PLAIN, name)
    assert (same.mapped, same.unmapped) == ((), {})
    others = {field: export(PLAIN.replace(**{field: value}), name) for field, value in OTHER_VALUES.items()}
    assert [field for field, other in others.items() if (field in other.mapped) is (field in other.unmapped)] == []
    unchanged = [same.text, *same.aside]
    assert [field for field, other in others.items() if [other.text, *other.aside] == unchanged] == []


def test_other_values_cover_every_knob() -> None:
    assert OTHER_VALUES.keys() == TrainConfig.model_fields.keys()
    assert len(changed_fields(CHANGED, TrainConfig())) == len(OTHER_VALUES)


@pytest.mark.parametrize("name", EXPORTERS)
def test_what_is_left_to_do_stands_in_one_place(name: str) -> None:
    made = export(CHANGED, name)
    place = "\n".join(made.aside) if name in WITHOUT_COMMENTS else made.text
    read = "\n".join(json.loads(place)["_comment"]) if name == "deepspeed" else place
    for line in list_lines(made.unmapped):
        assert read.count(line.removeprefix("# ")) == 1
    assert bool(made.aside) is (name in WITHOUT_COMMENTS)


def test_what_each_format_lacks_is_exact() -> None:
    loader = {"num_workers", "prefetch_factor", "pin_memory", "persistent_workers"}
    model = {"memory_format", "attention_backend"}
    code = {
        "matmul_precision",
        "cudnn_benchmark",
        "optimizer_implementation",
        "activation_checkpointing",
        "non_blocking",
    }
    allocators = {"host_allocator", "device_allocator"}
    started = allocators | {"num_threads"}
    own = {"user_knobs", "learning_rate_scale"}
    batch = {"micro_batch_size", "gradient_accumulation_steps"}
    shared = {*SHARED_KNOBS}
    hf = model | own | started | {"cudnn_benchmark"} | shared - {"bucket_cap_mb"}
    expected = {
        "torch": allocators | shared,
        "hf": hf,
        "hf-flags": hf | {"non_blocking"},
        "lightning": (model | loader | code | own | started | shared | {"micro_batch_size", "compile_mode"})
        - {"cudnn_benchmark"},
        "accelerate": (model | loader | code | own | started | batch | shared)
        - {"distributed_strategy", "reshard_after_forward"},
        "deepspeed": model | loader | code | own | started | shared | {"compile_mode"},
        "env": model | loader | code | own | batch | shared | {"compile_mode", "precision"},
    }
    assert {name: {*export(CHANGED, name).unmapped} for name in EXPORTERS} == expected


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(UsageError) as caught:
        export_profile(make_profile(), "keras")
    assert "'keras'" in caught.value.message
    assert caught.value.hint == "choose one of torch, hf, hf-flags, lightning, accelerate, deepspeed, env"


def test_an_export_is_frozen_and_data() -> None:
    made = export(CHANGED, "hf")
    with pytest.raises(ValueError, match="frozen"):
        made.text = ""  # type: ignore[misc]
    assert Export.model_validate_json(made.to_json()) == made


# ---- where it comes from


def test_the_head_says_gain_interval_machine_versions_and_day() -> None:
    lines = list_header(make_profile(date="2026-11-22"))
    assert lines[0].startswith("Measured by autotune on train.py:workload: improved: at least 1.31x faster")
    assert lines[0].endswith("interval 1.31-1.46")
    assert lines[1] == (
        "2026-11-22, NVIDIA H200, 16 CPUs of Xeon Platinum 8480C; PyTorch 2.13.0+cu130, Python 3.12.4, autotune 0.1.0"
    )
    assert "precision fp32 -> bf16" in lines[2]
    kept = list_header(make_profile(verdict="keep", config=BASELINE))
    assert "interval" not in kept[0]
    assert kept[1].startswith("NVIDIA H200")  # an older file knows no day
    assert kept[2] == "Nothing differs from your own settings."


@pytest.mark.parametrize("name", EXPORTERS)
def test_each_form_has_the_head(name: str) -> None:
    made = export_profile(make_profile(), name)
    head = made.aside if name in WITHOUT_COMMENTS else made.text.splitlines()
    assert sum("at least 1.31x faster" in line for line in head) == 1
    assert sum("PyTorch 2.13.0+cu130" in line for line in head) == 1


@pytest.mark.parametrize("name", EXPORTERS)
@pytest.mark.fault("37", injected="code in names and values of knobs, exported", outcome="quoted; nothing is run")
def test_hostile_knobs_stay_data(name: str) -> None:
    made = export(PLAIN.replace(user_knobs={HOSTILE: HOSTILE}), name)
    assert_inert(made, name)
    if name == "torch":
        assert run_source(made.text)["USER_KNOBS"] == {HOSTILE: HOSTILE}


@pytest.mark.parametrize("name", EXPORTERS)
def test_a_hostile_profile_stays_a_comment(name: str) -> None:
    """Its label, processor and versions may hold anything; they are told in the head of what is run or sourced."""
    line = '"\nimport os\nexport EVIL=1\nEVIL: 1\n$(touch evil)`touch evil`\u2028\x1b[31m"""'
    profile = make_profile()
    hostile = profile.replace(
        target=profile.target.replace(label=line),
        hardware=profile.hardware.replace(cpu_name=line),
        software=profile.software.replace(torch=line, python=line),
    )
    assert_inert(export_profile(hostile, name), name)


def assert_inert(made: Export, name: str) -> None:
    shown = [*made.text.splitlines(), *made.aside]
    assert not any("\x1b" in line for line in shown)
    assert not any(line.lstrip().startswith(("import os", "export EVIL", "EVIL")) for line in shown)
    if name == "torch":
        imported = [node for node in ast.walk(ast.parse(made.text)) if isinstance(node, ast.Import)]
        assert [alias.name for node in imported for alias in node.names] in ([], ["copy", "dataclasses", "torch"])
    elif name in ("hf", "deepspeed"):
        json.loads(made.text)


# ---- what a script is given


def test_a_script_is_given_lines_to_paste() -> None:
    made = export_profile(make_script_profile(), "torch")
    lines = [line for line in made.text.splitlines() if line and not line.startswith("#")]
    assert lines == [
        "DataLoader(..., num_workers=4, prefetch_factor=2, pin_memory=True)",
        "model.compile()",
        "torch.optim.AdamW(..., foreach=False, fused=True)  # or the optimizer that you use",
        'with torch.autocast("cuda", dtype=torch.bfloat16): ...  # around the forward pass and the loss',
    ]
    assert len(made.text.splitlines()) < 20
    assert "def train(" in export_profile(make_profile(), "torch").text


@pytest.mark.parametrize(
    ("label", "is_script"),
    [
        ("./train.py", True),
        ("train", True),
        ("train.py:workload", False),
        ("my train.py:workload", False),
        ("a.b:c", False),
        ("train.py --config=b.py:c", True),
    ],
)
def test_a_script_may_be_one_word(label: str, is_script: bool) -> None:
    assert ProfileTarget(label=label, fingerprint="0123456789ab").is_script is is_script


@settings(max_examples=60, deadline=None)
@given(config=configs, baseline=configs)
def test_a_fragment_is_python(config: TrainConfig, baseline: TrainConfig) -> None:
    ast.parse(export(config, "torch", baseline, is_script=True).text)


@pytest.mark.usefixtures("torch_settings")
def test_lines_of_a_fragment_are_taken_by_torch() -> None:
    """Each as it stands, on objects of the names that it uses."""
    alone = {name: getattr(PLAIN, name) for name in SHARED_KNOBS}
    config = CHANGED.replace(num_workers=1, pin_memory=False, user_knobs={}, **alone)
    dataset = torch.utils.data.TensorDataset(torch.zeros(96, 3, 4, 4))
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3))
    built: dict[str, Any] = {}
    names = {"model": model, "learning_rate": 2.0, "loss": 3.0, "batch": torch.zeros(2), "device": "cpu"}
    for line in list_lines(export(config, "torch", is_script=True).unmapped | _fragment_lines(config)):
        if line.startswith("DataLoader("):
            built["loader"] = torch.utils.data.DataLoader(dataset, **read_call(line)[1])
        elif line.startswith("torch.optim"):
            built["optimizer"] = torch.optim.AdamW(model.parameters(), **read_call(line)[1])
        elif line.startswith("torch.utils.checkpoint"):
            x = torch.ones(1, 3, 4, 4, requires_grad=True)
            built["checkpointed"] = torch.utils.checkpoint.checkpoint(model, x, **read_call(line)[1])
        elif not line.startswith("#"):
            exec(line, {"torch": torch}, names)
    assert (built["loader"].batch_size, built["loader"].num_workers, built["loader"].prefetch_factor) == (48, 1, 9)
    assert built["optimizer"].param_groups[0]["fused"] is True
    assert built["checkpointed"].requires_grad
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert (names["learning_rate"], names["loss"], torch.get_num_threads()) == (3.0, 1.0, 7)
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cudnn.benchmark is True


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_lines_for_several_processes_are_taken_by_torch(strategy: Any) -> None:
    """Each as it stands, in a group of one process."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    shared = PLAIN.replace(**{name: OTHER_VALUES[name] for name in SHARED_KNOBS}, gradient_accumulation_steps=2)
    config, baseline = shared.replace(distributed_strategy=strategy), shared.replace(distributed_strategy="fsdp")
    baseline = baseline if strategy == "ddp" else PLAIN
    lines = {name: line.partition("  #")[0] for name, line in export(config, "torch", baseline).unmapped.items()}
    with joined_alone():
        block = torch.nn.Linear(3, 3)
        if strategy == "fsdp":
            names: dict[str, Any] = {"block": block, "model": block}
            exec(f"import torch.distributed.fsdp\n{lines['reduce_dtype']}", {"torch": torch}, names)
            assert names["mp_policy"].reduce_dtype is torch.bfloat16
            exec(lines["distributed_strategy"], {"torch": torch}, names)
            assert isinstance(block, torch.distributed.fsdp.FSDPModule)
        else:
            whole = export(config, "torch", PLAIN).unmapped
            words = read_call(whole["bucket_cap_mb"])[1]
            model = torch.nn.parallel.DistributedDataParallel(block, **words)
            assert (model.bucket_bytes_cap, model.gradient_as_bucket_view) == (100 * 2**20, True)
            assert callable(default_hooks.bf16_compress_hook)
            assert "default_hooks.bf16_compress_hook" in whole["reduce_dtype"]


def _fragment_lines(config: TrainConfig) -> dict[str, str]:
    from autotune.emit.export.by_hand import list_by_hand

    return list_by_hand(ask(config), TrainConfig.model_fields)


# ---- the environment

TOO = "${LD_PRELOAD:+:$LD_PRELOAD}"
"""What a shell puts there: what the user preloads already."""
MEASURED = {"jemalloc": "/usr/lib/x/libjemalloc.so.2", "tcmalloc": "/opt/lib/libtcmalloc.so.4"}
STARTED = [name for name in EXPORTERS if name != "env"]


@pytest.mark.parametrize("name", STARTED)
def test_allocators_stand_in_the_line_to_start_with(name: str) -> None:
    config = PLAIN.replace(host_allocator="glibc-tuned", device_allocator="expandable-segments")
    (line,) = {*export(config, name).unmapped.values()}
    start = "# run as: MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=1073741824 "
    assert line.startswith(start + "PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:+")
    assert line.endswith(".py")


@pytest.mark.parametrize("value", MEASURED)
@pytest.mark.parametrize("name", STARTED)
def test_the_library_that_was_measured_is_preloaded(name: str, value: str) -> None:
    made = export(PLAIN.replace(host_allocator=value), name, libraries=MEASURED)
    line = made.unmapped["host_allocator"]
    assert line.startswith(f"# run as: LD_PRELOAD={MEASURED[value]}{TOO} ")
    assert "ldconfig" not in line


@pytest.mark.parametrize(
    ("value", "library", "package"),
    [
        ("jemalloc", "libjemalloc.so.2", "libjemalloc2"),
        ("tcmalloc", "libtcmalloc_minimal.so.4", "libtcmalloc-minimal4"),
    ],
)
@pytest.mark.parametrize("name", EXPORTERS)
def test_a_library_whose_path_is_not_known_goes_by_the_name_that_its_package_has(
    name: str, value: str, library: str, package: str
) -> None:
    made = export(PLAIN.replace(host_allocator=value), name, libraries={"other": "/lib/o.so"})
    shown = "\n".join([made.text, *made.aside])
    assert f"LD_PRELOAD={library}{TOO}" in shown.replace('="', "=")
    assert f"{library}: package {package} of Debian and Ubuntu" in shown
    assert f"ldconfig -p | grep {value}" in shown


@pytest.mark.parametrize(
    "path", ["/lib/a b.so", "/lib/x.so\nimport os", "lib.so", "/lib/$(id).so", "/lib/`id`.so", "/l;id"]
)
def test_a_path_that_a_shell_would_read_is_not_repeated(path: str) -> None:
    config = PLAIN.replace(host_allocator="tcmalloc")
    made = {name: export(config, name, libraries={"tcmalloc": path}) for name in EXPORTERS}
    assert [name for name, one in made.items() if one != export(config, name)] == []


def source(made: Export, folder: Path, own: str = "") -> dict[str, str]:
    """Return the environment of a process whose shell has sourced a file."""
    file = folder / made.filename
    file.write_text(made.text)
    subprocess.run(["bash", "-n", file], check=True, timeout=60)
    say = f"'{sys.executable}' -c 'import json, os; print(json.dumps(dict(os.environ)))'"
    done = subprocess.run(
        ["sh", "-ec", f"{own}\n. ./{file.name}\n{say}"],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    environment: dict[str, str] = json.loads(done.stdout)
    return environment


def test_a_sourced_file_sets_the_environment(tmp_path: Path) -> None:
    config = PLAIN.replace(num_threads=3, host_allocator="glibc-tuned", device_allocator="expandable-segments")
    found = source(export(config, "env"), tmp_path)
    assert found["OMP_NUM_THREADS"] == "3"
    assert found["MALLOC_MMAP_THRESHOLD_"] == found["MALLOC_TRIM_THRESHOLD_"] == "1073741824"
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize("own", ["", "/lib/libown.so", "/lib/a.so /lib/b.so"])
def test_a_sourced_file_extends_what_is_preloaded_already(own: str, tmp_path: Path) -> None:
    made = export(PLAIN.replace(host_allocator="tcmalloc"), "env", libraries=MEASURED)
    file = tmp_path / "asked.env"
    file.write_text(made.text)
    # Told by the shell itself: a library that is not there has no effect on it.
    shell = ["sh", "-ec", f'LD_PRELOAD="{own}"; . ./asked.env; printf %s "$LD_PRELOAD"']
    done = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == MEASURED["tcmalloc"] + (f":{own}" if own else "")


def test_a_sourced_file_takes_out_what_the_baseline_had(tmp_path: Path) -> None:
    baseline = PLAIN.replace(num_threads=4, device_allocator="expandable-segments")
    own = "export OMP_NUM_THREADS=4 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    found = source(export(PLAIN, "env", baseline), tmp_path, own)
    assert not {"OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF"} & found.keys()


def test_a_sourced_file_keeps_what_the_device_allocator_was_told(tmp_path: Path) -> None:
    made = export(PLAIN.replace(device_allocator="expandable-segments"), "env")
    own = "export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128"
    found = source(made, tmp_path, own)
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:128,expandable_segments:True"
    assert "PYTORCH_ALLOC_CONF" not in found
    newer = source(made, tmp_path, f"{own}\nexport PYTORCH_ALLOC_CONF=garbage_collection_threshold:0.8")
    assert newer["PYTORCH_ALLOC_CONF"] == "garbage_collection_threshold:0.8,expandable_segments:True"


def test_a_file_that_sets_nothing_says_so(tmp_path: Path) -> None:
    made = export(PLAIN.replace(precision="bf16"), "env")
    assert "Nothing of this answer is a matter of the environment." in made.text
    assert "OMP_NUM_THREADS" not in source(made, tmp_path)


# ---- transformers


def hf_arguments(config: TrainConfig, baseline: TrainConfig = PLAIN, **changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = json.loads(export(config, "hf", baseline, **changes).text)
    return arguments


def test_hf_names_and_values() -> None:
    assert hf_arguments(CHANGED, on_gpu=True) == {
        "per_device_train_batch_size": 48,
        "gradient_accumulation_steps": 3,
        "bf16": True,
        "fp16": False,
        "tf32": True,
        "activation_checkpointing": True,
        "torch_compile": True,
        "torch_compile_backend": "inductor",
        "torch_compile_mode": "max-autotune",
        "optim": "adamw_torch_fused",
        "ddp_bucket_cap_mb": 100,
        "dataloader_num_workers": 5,
        "dataloader_prefetch_factor": 9,
        "dataloader_pin_memory": True,
        "dataloader_persistent_workers": True,
        "accelerator_config": {"non_blocking": True},
    }


def test_hf_writes_what_differs_and_what_goes_with_it() -> None:
    assert hf_arguments(PLAIN) == {}
    assert hf_arguments(PLAIN.replace(micro_batch_size=16, gradient_accumulation_steps=2)) == {
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 2,
    }
    # Mixed precision without a GPU is refused unless the CPU is named.
    assert hf_arguments(PLAIN.replace(precision="bf16")) == {"bf16": True, "fp16": False, "use_cpu": True}
    # Left out, the Trainer would turn TF32 on.
    assert hf_arguments(PLAIN.replace(compile_mode="default"))["tf32"] is False
    assert hf_arguments(PLAIN, PLAIN.replace(compile_mode="default")) == {"torch_compile": False}
    # PyTorch refuses a prefetch factor and persistent workers where there are no workers.
    assert hf_arguments(TrainConfig(), PLAIN.replace(persistent_workers=True)) == {
        "dataloader_num_workers": 0,
        "dataloader_prefetch_factor": None,
        "dataloader_persistent_workers": False,
    }


def test_hf_flags_hold_nothing_that_a_shell_reads() -> None:
    words = export(CHANGED, "hf-flags").text.split()
    assert {*words[::2]} == {f"--{name}" for name in hf_arguments(CHANGED) if name != "accelerator_config"}
    assert all(word.replace("-", "").replace("_", "").isalnum() for word in words)
    gone = export(TrainConfig(), "hf-flags", PLAIN)
    assert gone.text == "--dataloader_num_workers 0\n"
    assert "# leave out --dataloader_prefetch_factor" in gone.aside


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize(
    ("implementation", "optim"),
    [("fused", "adamw_torch_fused"), ("foreach", "adamw_torch"), ("for-loop", "adamw_torch"), (None, None)],
)
def test_hf_optimizer(implementation: Any, optim: str | None, on_gpu: bool) -> None:
    baseline = PLAIN.replace(optimizer_implementation=None if implementation else "fused")
    config = PLAIN.replace(optimizer_implementation=implementation)
    made = export(config, "hf", baseline, on_gpu=on_gpu)
    can = implementation in ("fused", "foreach" if on_gpu else "for-loop")
    assert json.loads(made.text).get("optim") == (optim if can else None)
    assert ("optimizer_implementation" in made.mapped) is can
    assert ("optim is AdamW's" in "\n".join(made.aside)) is can


def test_hf_cannot_checkpoint_selectively() -> None:
    made = export(PLAIN.replace(activation_checkpointing="selective"), "hf")
    assert "activation_checkpointing" in made.unmapped
    assert json.loads(made.text) == {}


def install_fake_transformers(folder: Path, fields: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = folder / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('the exporter must not import transformers')")
    (package / "training_args.py").write_text(f"class TrainingArguments:\n{fields}")
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()


BOTH = "    activation_checkpointing: bool = False\n    gradient_checkpointing: bool = False\n"


@pytest.mark.parametrize(
    ("fields", "name"),
    [("    gradient_checkpointing: bool = False\n", "gradient_checkpointing"), (BOTH, "activation_checkpointing")],
)
def test_hf_takes_the_name_that_is_installed(
    fields: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_transformers(tmp_path, fields, monkeypatch)
    assert hf_arguments(PLAIN.replace(activation_checkpointing="full")) == {name: True}


@pytest.mark.parametrize("source", ["def broken(", "class Other:\n    x: int = 1\n"])
def test_hf_falls_back_to_the_newest_names(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_transformers(tmp_path, "    x: int = 1\n", monkeypatch)
    (tmp_path / "transformers" / "training_args.py").write_text(source)
    assert hf_arguments(PLAIN.replace(activation_checkpointing="full")) == {"activation_checkpointing": True}


# ---- Lightning, Accelerate, DeepSpeed


def read_yaml(text: str) -> Any:
    return pytest.importorskip("yaml").safe_load(text)


def test_lightning_names_and_values() -> None:
    made = export(CHANGED, "lightning")
    trainer = {"accumulate_grad_batches": 3, "precision": "bf16-mixed", "benchmark": True}
    assert read_yaml(made.text) == {"trainer": trainer}
    loader = {"batch_size": 48, "num_workers": 5, "prefetch_factor": 9, "pin_memory": True, "persistent_workers": True}
    assert read_call(made.unmapped["num_workers"]) == ("DataLoader", loader)
    assert read_call(made.unmapped["compile_mode"]) == ("torch.compile", {"mode": "max-autotune"})
    assert read_yaml(export(PLAIN, "lightning").text) == {"trainer": {}}


@pytest.mark.parametrize(("precision", "name"), [("fp32", "32-true"), ("bf16", "bf16-mixed"), ("fp16", "16-mixed")])
def test_lightning_precision(precision: Any, name: str) -> None:
    baseline = PLAIN.replace(precision="bf16" if precision == "fp32" else "fp32")
    made = export(PLAIN.replace(precision=precision), "lightning", baseline)
    assert read_yaml(made.text) == {"trainer": {"precision": name}}


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
    assert read_yaml(export(config, "accelerate").text) == plain
    compiled = read_yaml(export(config.replace(compile_mode="max-autotune"), "accelerate").text)
    assert compiled == plain | {
        "dynamo_config": {
            "dynamo_backend": "INDUCTOR",
            "dynamo_mode": "max-autotune",
            "dynamo_use_fullgraph": False,
            "dynamo_use_dynamic": False,
        }
    }


def test_accelerate_is_told_in_code_what_its_file_cannot_hold() -> None:
    made = export(CHANGED, "accelerate")
    name, arguments = read_call(made.unmapped["gradient_accumulation_steps"])
    loading = "accelerate.utils.DataLoaderConfiguration(non_blocking=True)"
    plugin = "accelerate.utils.GradientAccumulationPlugin(num_steps=3, sync_each_batch=True)"
    assert (name, arguments) == (
        "accelerate.Accelerator",
        {"gradient_accumulation_plugin": plugin, "dataloader_config": loading},
    )
    plain = export(CHANGED.replace(sync_each_micro_batch=False), "accelerate")
    assert read_call(plain.unmapped["gradient_accumulation_steps"])[1]["gradient_accumulation_steps"] == 3
    assert made.unmapped["non_blocking"] == made.unmapped["gradient_accumulation_steps"]
    assert "accelerate launch --config_file accelerate.yaml train.py" in made.unmapped["host_allocator"]


@pytest.mark.parametrize(
    ("changes", "on_gpu", "expected"),
    [
        ({}, False, {"distributed_type": "MULTI_GPU", "num_processes": 2}),
        ({}, True, {"distributed_type": "MULTI_GPU", "num_processes": 2}),
        (
            {"distributed_strategy": "fsdp", "reshard_after_forward": False},
            True,
            {
                "distributed_type": "FSDP",
                "num_processes": 2,
                "fsdp_config": {
                    "fsdp_version": 2,
                    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                    "fsdp_reshard_after_forward": False,
                },
            },
        ),
    ],
)
def test_accelerate_is_told_how_processes_share_the_model(
    changes: dict[str, Any], on_gpu: bool, expected: dict[str, Any]
) -> None:
    made = export(PLAIN.replace(**changes), "accelerate", processes=2, on_gpu=on_gpu)
    read = read_yaml(made.text)
    assert {name: read[name] for name in expected} == expected
    assert ("fsdp_config" in read) == bool(changes)


def test_accelerate_hands_on_what_ddp_is_given() -> None:
    config = PLAIN.replace(bucket_cap_mb=100, static_graph=True, precision="bf16", reduce_dtype="bf16")
    line = export(config, "accelerate").unmapped["bucket_cap_mb"]
    arguments = "bucket_cap_mb=100, gradient_as_bucket_view=False, static_graph=True"
    hook = "comm_hook=accelerate.utils.DDPCommunicationHookType.BF16"
    assert f"accelerate.DistributedDataParallelKwargs({arguments}, {hook})" in line


def test_accelerate_warns_of_its_one_thread() -> None:
    warning = "accelerate launch sets OMP_NUM_THREADS to 1 unless you set it: "
    assert f"{warning}6 is what PyTorch takes" in export(PLAIN, "accelerate", cores=6).text
    own = PLAIN.replace(num_threads=4)
    assert f"{warning}4 is what you have" in export(own.replace(num_workers=1), "accelerate", own, cores=6).text
    assert warning not in export(PLAIN, "accelerate", cores=6, on_gpu=True).text
    assert "OMP_NUM_THREADS" not in export(PLAIN.replace(num_threads=2), "accelerate").text


@pytest.mark.parametrize(
    ("precision", "autocast"),
    [
        ("fp32", {"enabled": False}),
        ("bf16", {"enabled": True, "dtype": "bfloat16"}),
        ("fp16", {"enabled": True, "dtype": "float16"}),
    ],
)
def test_deepspeed_names_and_values(precision: Any, autocast: dict[str, Any]) -> None:
    baseline = PLAIN.replace(precision="bf16" if precision == "fp32" else "fp32")
    fields = json.loads(export(CHANGED.replace(precision=precision), "deepspeed", baseline).text)
    del fields["_comment"]
    assert fields == {
        "train_micro_batch_size_per_gpu": 48,
        "gradient_accumulation_steps": 3,
        "torch_autocast": autocast,
    }
    batch = json.loads(export(PLAIN, "deepspeed").text)
    assert batch.keys() == {"_comment", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}


def test_only_the_difference_to_the_baseline_is_written() -> None:
    made = export_profile(make_profile(), "lightning")
    assert read_yaml(made.text) == {"trainer": {"precision": "bf16-mixed"}}
    assert {*made.mapped, *made.unmapped} == {*changed_fields(TUNED, BASELINE)}
    assert "num_threads" not in made.text
