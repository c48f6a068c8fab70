"""The lines that only a GPU runs and the test that exercises each: python tests/gpu/gpu_lines.py > docs/gpu.md."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES_RUN = Path(__file__).with_name("lines_run.json")
"""What `python tests/gpu/fake/on_the_fake.py` has measured: texts of lines, by module and function."""

_BEGINNINGS = ("torch.cuda", "torch.backends.cud", "torch.accelerator", "torch.get_device_module")
_ASKS = ("_module(", "on_accelerator(")

EXERCISED = {
    "autotune/arithmetics.py": "test_a_knob_trains_as_the_baseline_does",
    "autotune/cli": "test_a_search_ends_in_time_with_an_answer",
    "autotune/distributed": "test_a_process_on_each_gpu_takes_the_steps_of_one",
    "autotune/drift": "test_a_search_ends_in_time_with_an_answer",
    "autotune/engine": "test_a_knob_trains_as_the_baseline_does",
    "autotune/emit": "test_hf_optimizer",
    "autotune/hf.py": "test_a_trainers_parts_are_a_workload",
    "autotune/lightning.py": "test_a_module_and_its_data_are_a_workload",
    "autotune/isolation": "test_what_does_not_fit_is_a_result_and_the_next_launch_runs",
    "autotune/knobs.py": "test_a_search_ends_in_time_with_an_answer",
    "autotune/machine": "test_the_driver_is_asked",
    "autotune/machine/limits": "test_a_full_measurement_on_a_gpu",
    "autotune/machine/limits/all_reduce.py": "test_gpus_add_up",
    "autotune/measure": "test_a_knob_trains_as_the_baseline_does",
    "autotune/measure/clock.py": "test_steps_are_timed_by_events",
    "autotune/measure/speed_reference.py": "test_on_a_gpu_everything_is_left_as_it_was",
    "autotune/probe": "test_peak_memory_is_predicted",
    "autotune/records": "test_a_search_ends_in_time_with_an_answer",
    "autotune/runs": "test_a_knob_trains_as_the_baseline_does",
    "autotune/runs/ranks.py": "test_a_launch_of_a_process_on_each_gpu_is_timed_by_the_slowest",
    "autotune/search": "test_a_search_ends_in_time_with_an_answer",
    "autotune/train": "test_a_training_that_was_taken_up_again_is_the_same",
    "autotune/train/ranks": "test_a_process_on_each_gpu_takes_the_steps_of_one",
    "autotune/train/recovery": "test_a_training_that_runs_out_of_memory_takes_smaller_micro_batches",
}
"""By the longest beginning of a file's path."""

HEAD = """# On a GPU

It has run on one GPU so far, an NVIDIA H200 (torch 2.11 with CUDA 13.0, driver 580, Python 3.12), three times for a
quarter of an hour: [what was shown there](#on-a-real-one). Before, it was written against the source of PyTorch and the
documentation of NVML, tested with recorded answers of a driver, and run on a fake GPU. Take a search on a GPU for a
preview: its claims are made by the same paired launches and checks as on a CPU, but none has been proven there yet.

    make test-gpu

runs each path below on one NVIDIA GPU in under ten minutes and prints a table: what passed, and a figure for each.
The paths that a CPU has too run without a GPU; the others are skipped.

## On a real one

On the H200, the paths of `make test-gpu` side by side, without its searches: 31 passed, 5 failed, none hung.

- Passed: steps timed by events, the driver's answers, measured limits (51 TFLOP/s in fp32, 408 in TF32, 789 in bf16,
  4.2 TB/s), each knob's losses beside the baseline's (bf16, fp16 with a loss scaler, TF32, fused optimizer, channels
  last, cudnn.benchmark, expandable segments, compiled, CUDA graphs, pinned and asynchronous copies), the four attention
  kernels, running out of memory in a trial and in a training, a script probed and trained, DDP and FSDP2 in a process
  of one GPU.
- Failed: three tests that compile in pytest's own process, which made errors of a compiler's remarks; the peak that was
  predicted for a network of a few MiB, beside neighbours on the card; and a resumed training that was not the same to
  the bit: some of cuDNN's kernels add up in the order that threads arrive in. The tests ask what a GPU can answer now,
  and a neighbour's memory is no longer taken for the training's. Of these paths 15 ran again,
  and passed: the compiled ones, the knobs, running out of memory, the predicted peak. The resumed training was not
  reached.
- `autotune probe`, of the machine, the demo and a script (nanoGPT's training of characters, 10.8 million parameters, in
  fp32 with TF32), took 8 to 25 s each. It called each index that the host reads in an array a wait for the GPU, and a
  cast to float32 by the script the script's own precision: both are mended.
- `autotune search --budget 190s` of that script ended in time with "keep your settings": `compile=default` read 1.12x,
  and there was no time for loss checks. By hand bf16 made it 1.15x as fast, bf16 and compiled together 1.43x. It had
  tried what nobody would (TF32 off, the optimizer's loop), for what is usual was known of CPUs alone; with what is
  usual on a GPU, counted from the script's own settings, its search of 20 minutes on a simulated clock tries bf16
  first, and both together at the fourth launch. That has not run on a GPU either.
- `autotune train --profile best.json` trained it to its end.
- The second time, two scripts whose batches a loader makes; a process starts for 9 to 16 s there. A ResNet-18 on
  made-up CIFAR-10, in `nn.DataParallel`, fp32, two workers, in six minutes: *inconclusive*. 16 workers read 1.1 to
  1.2x, with CUDA graphs and channels last 1.86x, and once 0.48x: the launch had come to the short batch that ends an
  epoch, and compiled, looked for kernels and captured a graph for it for 26 s, of which 4 s were left in what was
  timed. That is taken off now. PyTorch's MNIST example in batches of 256, whose step waits for its one worker for 87
  % of its time, in 205 s: *keep your settings*, after two launches that were lost. Copies that return early asked for
  page-locked memory in a loader's worker, which has no GPU, and crashed; and channels last, under which a GPU draws
  other dropout masks, was refused for losses that differed by chance. Both are mended; the ResNet's search has run
  again, the other one has not.
- The third time, a script's launch took 0.8 s to start instead of 9 (torch and its compiler take that long to import
  there; a process that has imported both is forked, and no device is touched before), and none crashed.
  nanoGPT's characters, in four minutes: *inconclusive*, bf16 compiled 1.25x (95 % 1.05 to 1.48, 5 pairs; by hand
  1.43x on the same kind of machine). bf16 was the first launch, both together the fifth, and the gradients of both
  passed without a training. The user's own settings repeat themselves there to 2.5 %, for the GPU is what they wait
  for; what is faster waits for Python and the loader, on sixteen shared cores whose speed wandered by a
  third within seconds: 4,942 to 7,191 samples/s. The ResNet-18 on made-up CIFAR-10, in seven and a half minutes:
  *inconclusive*, compiled with channels last and 16 workers 1.20x (0.99 to 1.45, 5 pairs). Its own settings ran at
  5,943 to 7,755 samples/s within four minutes. bf16, at 1.39x, was left open by its gradients after 75 steps and by one
  training, too noisy for the limit.
- So pairs are timed [in turns](measuring.md) on a GPU too since, where both fit into its memory, and a proof measures
  longer where its candidate's blocks differ more than the user's own. That has run on the fake GPU alone: there a
  script whose optimizer was fused read 1.06 to 1.32x in six pairs one after the other, which proves nothing, and in
  turns at least 1.08x with seven.

## The fake GPU

    make test-gpu-fake

runs the same paths without a GPU, on a fake one (`tests/gpu/fake/`): a CUDA back end for a CPU build of PyTorch 2.13,
in C++, which the tests compile. Its kernels are registered under the dispatcher's CUDA key and are the CPU's, on the
same memory, so the numbers are a CPU's to the bit. It has a caching allocator that rounds, splits, caches, and runs
out as CUDA's does, streams with what is pending in them, events, random generators, page-locked memory, copies that
wait or do not, and an NVML of its own. `torch.cuda` is PyTorch's own, in Python, and nothing of autotune knows of it.

What it cannot tell, and a GPU alone can:

- how long anything takes: a kernel is done when its launch returns, so nothing ever overlaps, and no launch is late
- what `torch.compile` makes of a model (Triton), and CUDA graphs: gradients accumulated under them are known to fail
  in PyTorch, so such a launch is a crash, and a training's step down to smaller micro batches leaves the graphs
- kernels seen by the profiler (CUPTI): without any, a probe says nothing of the step's computation, rather than that
  the GPU idles
- TF32, `cudnn.benchmark`, the attention kernels, `expandable_segments`: they are switched on, and change nothing
  there
- fragmentation across streams, memory that a context or a library takes, and what is reached by NCCL: several GPUs

## Other accelerators

An AMD GPU is `cuda` to PyTorch (ROCm), and is used as one; NVML tells nothing of it, so its clock and what else is at
work on it are not known, and nobody has tried it. Any other accelerator of PyTorch's, Intel's `xpu`
among them, is refused in one sentence: its times and its memory would be read wrongly, and settings that were found
on the CPU would say nothing about it. `--device cpu` (or `AUTOTUNE_DEVICE=cpu`) keeps a workload on the CPU, there
and beside a supported GPU. A script chooses its device itself: it is refused once its model is on such a device, and
`autotune train -- python train.py` trains it there all the same.

## What only a GPU runs

Written by `python tests/gpu/gpu_lines.py`: the functions with lines that ask for a GPU, how many of these the fake
one has run when that was last measured (yes: all of them), and the test that exercises each on a GPU.

| module | functions | lines | on the fake | test |
| --- | --- | --: | --- | --- |"""


def find_functions(source: str) -> Iterator[tuple[str, dict[int, str]]]:
    """Yield the name of each function that asks for a GPU, and the lines on which it does, by number."""
    texts = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            numbers = {inner.lineno for inner in ast.walk(node) if hasattr(inner, "lineno") and _is_about_a_gpu(inner)}
            if numbers:
                yield node.name, {number: texts[number - 1].strip() for number in sorted(numbers)}


def _is_about_a_gpu(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return node.value == "cuda"
    if isinstance(node, ast.Call):
        return ast.unparse(node).startswith(_ASKS)
    return isinstance(node, ast.Attribute) and ast.unparse(node).startswith(_BEGINNINGS)


def find_test(module: str) -> str | None:
    """Return the test that exercises a module; None without one."""
    beginnings = [one for one in EXERCISED if module == one or module.startswith(f"{one}/")]
    return EXERCISED[max(beginnings, key=len)] if beginnings else None


def list_lines() -> dict[str, dict[str, dict[int, str]]]:
    """Return the lines that ask for a GPU, by module, function and number."""
    found: dict[str, dict[str, dict[int, str]]] = {}
    for path in sorted((ROOT / "autotune").rglob("*.py")):
        for name, lines in find_functions(path.read_text()):  # methods of two classes may have one name
            found.setdefault(path.relative_to(ROOT).as_posix(), {}).setdefault(name, {}).update(lines)
    return found


def count_run(functions: dict[str, dict[int, str]], run: dict[str, list[str]]) -> int:
    """Return how many lines of a module the fake GPU has run, as they are now."""
    return sum(text in run.get(name, ()) for name, lines in functions.items() for text in lines.values())


def make_page() -> str:
    """Return the page."""
    run = json.loads(LINES_RUN.read_text())
    rows = []
    for module, functions in list_lines().items():
        lines, on_fake = sum(map(len, functions.values())), count_run(functions, run.get(module, {}))
        told = "yes" if on_fake == lines else f"{on_fake}" if on_fake else "no"
        rows.append(f"| {module} | {', '.join(functions)} | {lines} | {told} | {find_test(module)} |")
    return "\n".join([HEAD, *rows]) + "\n"


if __name__ == "__main__":
    print(make_page(), end="")
