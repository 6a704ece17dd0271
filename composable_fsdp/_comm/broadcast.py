"""Values of the first rank of a mesh, on all its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["broadcast_", "fill_"]

MESSAGE_BYTES = 32 << 20
"""Small tensors share messages of up to this size; what is larger by itself travels alone, without a copy."""


@torch.no_grad()
def broadcast_(tensors: Iterable[torch.Tensor], mesh: DeviceMesh) -> None:
    """Overwrites plain ``tensors`` in place with those of the first rank of ``mesh``, along all its axes.

    All ranks of the mesh must pass tensors of the same shapes and dtypes, of any dtype, in the same order. They may be
    on any device, and are sent on the mesh's.
    """
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    if not groups:
        return
    for batch in _batches(tensors):
        (first, *others) = batch
        alone = not others and first.is_contiguous() and first.device.type == mesh.device_type
        message = first if alone else torch.cat([t.to(mesh.device_type).reshape(-1) for t in batch])
        # As bytes: not every backend sends every dtype. Axis by axis: after each, one axis more has the right values.
        for group in groups:
            dist.broadcast(message.detach().view(-1).view(torch.uint8), group=group, group_src=0)
        if not alone:
            for tensor, piece in zip(batch, message.split([t.numel() for t in batch]), strict=True):
                fill_(tensor, piece.view(tensor.shape))


def _batches(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors of one dtype in lists of up to ``MESSAGE_BYTES``; none of them empty."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same in by_dtype.values():
        batch: list[torch.Tensor] = []
        size = 0
        for tensor in same:
            if batch and size + tensor.nbytes > MESSAGE_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(tensor)
            size += tensor.nbytes
        yield batch


def fill_(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrites ``tensor``, which may be an expanded one, with ``values`` of its shape from any device."""
    if torch._debug_has_internal_overlap(tensor) == 1:  # expanded: elements share memory, so torch refuses to copy
        tensor.data = values.to(tensor.device, tensor.dtype, copy=True)
    else:
        tensor.copy_(values)
