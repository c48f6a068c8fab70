"""Tensors of which each process has a shard, and any other: what is here of them, all of them, a shard of a whole."""

from __future__ import annotations

from torch import Tensor


def is_shard(tensor: Tensor) -> bool:
    """Return whether a tensor is a `DTensor`, without the second that it takes to import that."""
    return hasattr(tensor, "full_tensor")


def local_part(tensor: Tensor) -> Tensor:
    """Return what this process has of a tensor: its shard, or all of it."""
    if not is_shard(tensor):
        return tensor
    local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor; of a sharded one every process has to ask."""
    if not is_shard(tensor):
        return tensor
    full: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return full


def take_shard(full: Tensor, like: Tensor) -> Tensor:
    """Return this process's part of a whole tensor, sharded as another one is.

    Args:
        full: the whole.
        like: of its shape; where it is not sharded, or of another shape, the whole is left as it is.
    """
    if not is_shard(like) or like.shape != full.shape:
        return full
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(like, DTensor)
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    part = full[tuple(slice(first, first + length) for first, length in zip(offset, shape, strict=True))]
    found = make_empty(like, full)
    local_part(found).copy_(part)
    return found


def make_empty(like: Tensor, kind: Tensor) -> Tensor:
    """Return zeros of a tensor's type, sharded as another one of its shape is; whole on the host where none is.

    Args:
        like: whose placement it has.
        kind: whose shape and type it has; a `meta` tensor will do.
    """
    import torch

    if is_shard(like) and like.shape == kind.shape:
        return torch.zeros_like(like, dtype=kind.dtype, requires_grad=False)
    return torch.zeros(kind.shape, dtype=kind.dtype)
