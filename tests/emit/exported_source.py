"""Settings to export, and what the tests do with the text that comes of it."""

from __future__ import annotations

import ast
from typing import Any

from autotune.emit.export import Request
from autotune.records import TrainConfig

OTHER_VALUES: dict[str, Any] = {
    "micro_batch_size": 48,
    "gradient_accumulation_steps": 3,
    "learning_rate_scale": 1.5,
    "precision": "bf16",
    "matmul_precision": "high",
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
    "distributed_strategy": "fsdp",
    "bucket_cap_mb": 100,
    "gradient_as_bucket_view": True,
    "static_graph": True,
    "reshard_after_forward": False,
    "sync_each_micro_batch": True,
    "reduce_dtype": "bf16",
    "user_knobs": {"lr": 0.001},
}
# Two workers: without any, prefetch and persistence have no effect to export.
PLAIN = TrainConfig(num_workers=2)
CHANGED = TrainConfig(**OTHER_VALUES)


def ask(config: TrainConfig, baseline: TrainConfig = PLAIN, **changes: Any) -> Request:
    """Return what an exporter is asked for settings that differ from a baseline."""
    return Request(config=config, baseline=baseline, **changes)


def run_source(text: str) -> dict[str, Any]:
    """Run generated Python without its `__main__` part and return its names."""
    names: dict[str, Any] = {"__name__": "generated"}
    exec(compile(text, "generated.py", "exec"), names)
    return names


def read_call(line: str) -> tuple[str, dict[str, Any]]:
    """Return what a line as `DataLoader(..., num_workers=2)` calls, and its arguments by name."""
    (statement,) = ast.parse(line).body
    assert isinstance(statement, ast.Expr | ast.Assign)
    call = statement.value
    assert isinstance(call, ast.Call)
    assert [ast.unparse(argument) for argument in call.args] in (["..."], [], ["module"], ["block", "..."])
    return ast.unparse(call.func), {str(word.arg): _read_value(word.value) for word in call.keywords}


def _read_value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
