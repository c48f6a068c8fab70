"""An accelerator that autotune does not support, as a vendor's package adds one: PyTorch loads it by itself.

`npu` is torch's accelerator, in Python (PrivateUse1), as far as asking for it goes; it computes nothing.
"""

from __future__ import annotations

import torch
from torch.utils import backend_registration


class Npu:
    """The device's own module, `torch.npu`."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        pass


def load() -> None:
    backend_registration._setup_privateuseone_for_python_backend("npu", backend_module=Npu())  # type: ignore[no-untyped-call]
    assert torch.accelerator.current_accelerator() == torch.device("npu")
