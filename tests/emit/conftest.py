from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def torch_settings() -> Iterator[None]:
    """Put back what exported code sets for the whole process."""
    before = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    yield
    torch.set_num_threads(before[0])
    torch.set_float32_matmul_precision(before[1])
    torch.backends.cudnn.benchmark = before[2]
