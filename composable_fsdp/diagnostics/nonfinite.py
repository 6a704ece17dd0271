"""``find_nonfinite``: the parameters with nan or infinite gradients or values, and the ranks that have them."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composable_fsdp._consistency.verify_ranks import gather_rows
from composable_fsdp._core.comm import communicator_over
from composable_fsdp._core.params import local_part
from composable_fsdp._extents import parameters_at_rest


@torch.no_grad()
def find_nonfinite(module: nn.Module, *, values: bool = False) -> dict[str, tuple[int, ...]]:
    """Find the parameters of ``module`` whose gradients have nan or infinite elements, before they are used.

    Call it after backward, on all ranks. It all-gathers one byte per parameter over each mesh axis. Each rank checks
    its own shards, which are already reduced: a nan loss on one rank is found on every rank with a shard.

    Args:
        module: a module, sharded, in part or not at all.
        values: check the parameters themselves instead of their gradients.

    Returns:
        For each such parameter, by its name in the order of the module, the global ranks that have such elements. The
        same on all ranks of the mesh; empty if everything is finite. Plain parameters are compared over the first mesh.
    """
    parameters = parameters_at_rest(module)
    meshes = dict.fromkeys(p.device_mesh for p in parameters.values() if isinstance(p, DTensor))
    first = next(iter(meshes), None)
    found: dict[str, tuple[int, ...]] = {}
    for mesh in meshes or (None,):
        here = {n: p for n, p in parameters.items() if (p.device_mesh if isinstance(p, DTensor) else first) == mesh}
        flags = _flags([p if values else p.grad for p in here.values()], mesh)
        ranks = mesh.mesh.flatten().tolist() if mesh is not None else [0]
        for name, column in zip(here, flags.T.tolist(), strict=True):
            if any(column):
                found[name] = tuple(rank for rank, flag in zip(ranks, column, strict=True) if flag)
    return {name: found[name] for name in parameters if name in found}


def _flags(tensors: Sequence[torch.Tensor | None], mesh: DeviceMesh | None) -> torch.Tensor:
    """Return a ``(ranks, tensors)`` tensor, in the rank order of ``mesh``, that is 1 where a shard is not finite."""
    device = torch.device(mesh.device_type if mesh is not None else "cpu")
    own = [_is_nonfinite(tensor, device) for tensor in tensors]
    flags = torch.stack(own) if own else torch.empty(0, dtype=torch.uint8, device=device)
    if mesh is None:
        return flags[None]
    last_first = [axis for axis in reversed(range(mesh.ndim)) if mesh.size(axis) > 1]  # the last varies fastest
    axes = [communicator_over(mesh.get_group(axis), mesh.device_type) for axis in last_first]
    return gather_rows(flags, axes, "search for gradients that are not finite").cpu()


def _is_nonfinite(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    local = None if tensor is None else local_part(tensor)
    if local is None or not local.numel() or not (local.is_floating_point() or local.is_complex()):
        return torch.zeros((), dtype=torch.uint8, device=device)
    largest: torch.Tensor = torch.linalg.vector_norm(local, inf)  # nan where any is
    return largest.isfinite().logical_not().to(device, torch.uint8)
