"""The device that is chosen, and the ones that are refused in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import backend_registration

from autotune.engine import device as devices
from autotune.engine.compilation import captures_graphs
from autotune.engine.device import choose_device, require_supported
from autotune.errors import MachineError, UsageError
from autotune.records import TrainConfig
from autotune.records.trial import DEVICE_VARIABLE

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]

needs_accelerators_of_python = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason=f"torch {torch.__version__} has no accelerators written in Python",
)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("mps", "Apple's GPU (mps)"), ("xpu", "an Intel GPU (xpu)"), ("hpu", "an accelerator of type hpu")],
)
def test_what_is_not_supported_is_refused_with_what_is(kind: str, name: str) -> None:
    with pytest.raises(MachineError) as caught:
        require_supported(torch.device(kind))
    assert caught.value.message == (
        f"this machine has {name}, which is not supported: autotune measures on NVIDIA GPUs, on AMD GPUs by ROCm, and "
        "on CPUs"
    )
    assert "--device cpu" in caught.value.hint
    with pytest.raises(MachineError, match="the script's model is on"):
        require_supported(torch.device(kind), of_script=True)


def test_what_is_supported_is_not_refused() -> None:
    for device in (CPU, torch.device("cuda"), torch.device("cuda", 1)):
        require_supported(device)


def test_a_name_is_taken_as_it_is() -> None:
    assert choose_device("cpu") == CPU
    assert choose_device("cuda") == torch.device("cuda")


def test_the_environment_asks_for_the_cpu_or_is_told_what_it_may_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, "cpu")
    assert choose_device("auto") == CPU
    monkeypatch.setenv(DEVICE_VARIABLE, "mps")
    with pytest.raises(UsageError, match="AUTOTUNE_DEVICE=mps: no device to choose"):
        choose_device("auto")


def test_no_accelerator_is_asked_for_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def current_accelerator() -> None:
        raise RuntimeError("Cannot access accelerator device when none is available.")  # of PyTorch 2.6

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert choose_device("auto") == CPU
    assert devices.count_accelerators() == 0


def test_of_a_cpu_there_is_nothing_to_ask() -> None:
    devices.synchronize(CPU)
    devices.reset_peak(CPU)
    devices.release_cached(CPU)
    devices.limit_device_memory(2**20, CPU)
    devices.restore_device_generator(devices.read_device_generator(CPU), CPU)
    assert devices.peak_reserved_bytes(CPU) is None
    assert devices.reserved_bytes(CPU) == devices.count_allocation_retries(CPU) == 0


@pytest.mark.parametrize("mode", ["off", "default", "max-autotune-no-cudagraphs", "reduce-overhead", "max-autotune"])
def test_two_modes_of_compiling_capture_graphs_on_a_gpu(mode: str) -> None:
    config = TrainConfig(compile_mode=mode)
    assert captures_graphs(config, torch.device("cuda")) == (mode in ("reduce-overhead", "max-autotune"))
    assert not captures_graphs(config, CPU)


PROGRAM = """
import os
from autotune.engine.device import choose_device, count_accelerators
for ask in (lambda: choose_device("auto"), count_accelerators):
    try:
        print(ask())
    except Exception as error:
        print(type(error).__name__, error)
os.environ["AUTOTUNE_DEVICE"] = "cpu"
print(choose_device("auto"), count_accelerators())
"""


def run_with_another_accelerator(*words: str, folder: Path | None = None) -> tuple[int, str]:
    """Run Python where PyTorch has an accelerator of a vendor's own, as its package adds one."""
    paths = [str(ROOT / "tests" / "gpu" / "other_accelerator"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    ended = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.slow
@needs_accelerators_of_python
def test_a_vendors_accelerator_is_found_and_refused() -> None:
    code, told = run_with_another_accelerator("-c", PROGRAM)
    assert code == 0, told
    assert told.count("MachineError this machine has an accelerator of type npu, which is not supported") == 2
    assert told.endswith("\ncpu 0\n")


@needs_accelerators_of_python
@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("probe",), ("probe", "demo"), ("search", "demo", "--budget", "20s"), ("train", "demo", "--steps", "3")]
)
def test_a_command_refuses_it_in_one_sentence_and_leaves_no_run(words: tuple[str, ...], tmp_path: Path) -> None:
    code, told = run_with_another_accelerator("-m", "autotune", *words, folder=tmp_path)
    assert code == MachineError.exit_code, told
    assert "error: this machine has an accelerator of type npu, which is not supported" in told
    assert "Traceback" not in told
    assert not (tmp_path / "runs").exists()


@needs_accelerators_of_python
@pytest.mark.slow
def test_a_command_that_is_told_to_trains_on_the_cpu(tmp_path: Path) -> None:
    code, told = run_with_another_accelerator(
        "-m", "autotune", "train", "demo", "--steps", "3", "--device", "cpu", folder=tmp_path
    )
    assert code == 0, told
    assert "trained 3 steps" in told


ELSEWHERE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Linear(4, 2, device="meta")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, labels in DataLoader(TensorDataset(torch.randn(640, 4), torch.zeros(640).long()), batch_size=8):
    nn.functional.cross_entropy(model(inputs.to("meta")), labels.to("meta")).backward()
    optimizer.step()
"""


@needs_accelerators_of_python
@pytest.mark.slow
def test_a_script_whose_model_is_elsewhere_is_not_timed_wrongly(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ELSEWHERE)
    words = ("-m", "autotune", "probe", "--", sys.executable, "train.py")
    code, told = run_with_another_accelerator(*words, folder=tmp_path)
    assert code == MachineError.exit_code, told
    assert "the script's model is on an accelerator of type meta, which is not supported" in told


@needs_accelerators_of_python
@pytest.mark.slow
def test_a_script_on_the_cpu_is_probed_beside_it(tmp_path: Path) -> None:
    on_cpu = ELSEWHERE.replace(', device="meta"', "").replace('.to("meta")', "").replace("640", "64000")
    (tmp_path / "train.py").write_text(on_cpu)
    words = ("-m", "autotune", "probe", "--json", "--", sys.executable, "train.py")
    code, told = run_with_another_accelerator(*words, folder=tmp_path)
    assert code == 0, told
    assert '"device": "cpu"' in told
