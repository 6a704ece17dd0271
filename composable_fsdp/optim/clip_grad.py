"""Gradient clipping for plain tensors and DTensors on any meshes, with any placements.

The p-norm of a tensor that is sharded over some mesh axes is the p-norm of its shards' norms. So every rank sums the
p-th powers of its local norms, one number per pair of a mesh and the axes that tensors are sharded over. Each mesh axis
then needs one all-reduce, with the numbers of all pairs that include it. Replicated and plain tensors need none.

Invariant: the collectives of a rank depend on meshes and placements alone, which are the same on every rank. They
depend neither on local shards, which may be empty, nor on which gradients exist.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterable, Sequence
from math import inf
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from composable_fsdp._core.memory import group_by_key, widest_float
from composable_fsdp._core.params import local_part
from composable_fsdp._extents import parameters_at_rest
from composable_fsdp.errors import ConfigurationError, GradientError, MeshError

Tensors = torch.Tensor | Iterable[torch.Tensor]

_NARROW = (torch.float16, torch.bfloat16)
"""The dtypes whose sums and norms are computed in float32."""


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients in place so that their total norm, over all ranks, is at most ``max_norm``.

    It corresponds to ``torch.nn.utils.clip_grad_norm_`` in one process: the norm is that of all full gradients
    concatenated. Gradients may be plain tensors or DTensors on any meshes; each counts once. Every rank of the meshes
    must call it with the same parameters; a gradient may be ``None`` on some ranks only. Gradients of plain parameters
    must be the same on every rank.

    Args:
        parameters: a module, a parameter, or parameters.
        max_norm: the largest total norm that is not scaled.
        norm_type: order of the norm, positive; ``inf`` is the largest absolute value.
        error_if_nonfinite: raise if the norm is nan or infinite, instead of scaling by it.
        foreach: as torch has it. It has no effect: torch's ``_foreach`` operations take any tensors.

    Returns:
        The total norm before clipping: a plain 0-d tensor on the first gradient's device, the same on every rank. It is
        float64 if any gradient is, else float32, also for gradients of lower precision.

    Raises:
        ConfigurationError: ``norm_type`` is not positive.
        GradientError: the norm is not finite, and ``error_if_nonfinite`` is set. Every rank raises it.
        MeshError: this rank is not in the mesh of a gradient.
    """
    items = _parameters(parameters)
    inputs = [(p if g is None else g, g) for p in items if (g := p.grad) is not None or p.requires_grad]
    total = _total_norm(inputs, norm_type, error_if_nonfinite)
    gradients = [local_part(g) for _, g in inputs if g is not None]
    _scale(gradients, torch.clamp(float(max_norm) / (total + 1e-6), max=1.0))
    return total


@torch.no_grad()
def get_total_norm(tensors: Tensors, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> torch.Tensor:
    """Return the norm of all ``tensors`` concatenated, over all ranks, as in :func:`clip_grad_norm_`.

    Args:
        tensors: gradients or other tensors, plain ones and DTensors; the same ones on every rank of their meshes.
        norm_type: order of the norm, positive; ``inf`` is the largest absolute value.
        error_if_nonfinite: raise if the result is nan or infinite.

    Returns:
        A plain 0-d tensor, the same on every rank; float64 if any of ``tensors`` is, else float32.

    Raises:
        ConfigurationError: ``norm_type`` is not positive.
        GradientError: the norm is not finite, and ``error_if_nonfinite`` is set. Every rank raises it.
    """
    items = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    return _total_norm([(item, item) for item in items], norm_type, error_if_nonfinite)


def _parameters(parameters: nn.Module | Tensors) -> list[torch.Tensor]:
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    if isinstance(parameters, nn.Module):
        return list(dict.fromkeys(parameters_at_rest(parameters).values()))
    items = list(parameters)
    if not items and isinstance(parameters, types.GeneratorType):
        warnings.warn("clip_grad_norm_ was given an exhausted generator, so it clips nothing.", stacklevel=4)
    return items


# -- the norm


_ShardAxes = tuple[tuple[DeviceMesh, int], ...]
"""The axes of a mesh that a tensor is sharded over, each with the mesh; none for a plain or replicated tensor."""

_NormInput = tuple[torch.Tensor, torch.Tensor | None]
"""A tensor whose mesh and placements are the same on every rank, and the tensor with that layout to count, if any."""


def _total_norm(inputs: Sequence[_NormInput], norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
    """Return the norm of the tensors in ``inputs``."""
    order = float(norm_type)
    if not order > 0:
        raise ConfigurationError(f"norm_type must be positive or inf, not {norm_type!r}.")
    shards = _by_shard_axes(inputs)
    tensors = [tensor for part in shards.values() for tensor in part]
    here = next((local_part(tensor).device for _, tensor in inputs if tensor is not None), torch.device("cpu"))
    wide = any(t.dtype in (torch.float64, torch.complex128) for t in tensors)
    sums = [_sum_of_powers(part, order, here) for part in shards.values()]
    total = torch.stack(sums)
    for device, group, indices in _all_reduces(list(shards)):
        numbers = total[indices].to(device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX if order == inf else dist.ReduceOp.SUM, group)
        total[indices] = numbers.to(here)
    if order == inf:
        norm = torch.where(total[:, 1].any(), total.new_full((), torch.nan), total[:, 0].amax())
    else:
        norm = total.sum().pow(1.0 / order)
    norm = norm.to(torch.float64 if wide else torch.float32)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise GradientError(
            f"the total norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be clipped. "
            "composable_fsdp.find_nonfinite(model), called on all ranks, names the parameters at fault. Skip this "
            "step (zero_grad, no optimizer step), lower the learning rate or the loss scale, or pass "
            "error_if_nonfinite=False to scale by it anyway."
        )
    return norm


def _by_shard_axes(inputs: Sequence[_NormInput]) -> dict[_ShardAxes, list[torch.Tensor]]:
    """Return the local tensors by the axes they are sharded over. The axes are computed once per placement."""
    shards: dict[_ShardAxes, list[torch.Tensor]] = {(): []}
    known: dict[object, tuple[list[torch.Tensor], bool]] = {}
    for like, tensor in inputs:
        placement = (like.device_mesh, like.placements) if isinstance(like, DTensor) else None
        if placement not in known:
            pending = isinstance(like, DTensor) and any(p.is_partial() for p in like.placements)
            known[placement] = shards.setdefault(_shard_axes(like), []), pending
        part, pending = known[placement]
        if tensor is not None:
            part.append(local_part(_summed(tensor) if pending else tensor))
    return shards


def _shard_axes(tensor: torch.Tensor) -> _ShardAxes:
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    if mesh.get_coordinate() is None:
        raise MeshError(
            f"a gradient of shape {tuple(tensor.shape)} is on the mesh {mesh.mesh.tolist()}, which rank "
            f"{dist.get_rank()} is not in. Pass only gradients whose mesh has this rank."
        )
    return tuple(
        (mesh, axis)
        for axis, placement in enumerate(tensor.placements)
        if not placement.is_replicate() and not placement.is_partial() and mesh.size(axis) > 1
    )


def _all_reduces(axis_sets: Sequence[_ShardAxes]) -> list[tuple[str, dist.ProcessGroup, list[int]]]:
    """Return one all-reduce per distinct set of ranks, in the order in which an axis first has them.

    Each has a device, a process group, and the indices of the axis sets whose numbers it sums.

    All ranks of a set get the same axis sets for it, in the same order, so no two ranks wait for each other.
    """
    reductions: dict[tuple[str, tuple[int, ...]], tuple[str, dist.ProcessGroup, list[int]]] = {}
    for index, axes in enumerate(axis_sets):
        for mesh, axis in axes:
            group, device = mesh.get_group(axis), mesh.device_type
            key = (device, tuple(dist.get_process_group_ranks(group)))
            reductions.setdefault(key, (device, group, []))[2].append(index)
    return list(reductions.values())


def _summed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the DTensor ``tensor`` with its partial sums reduced, at least in float32. It is a collective."""
    assert isinstance(tensor, DTensor)
    placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
    wide = cast(DTensor, tensor.to(torch.float32)) if tensor.dtype in _NARROW else tensor
    return wide.redistribute(placements=placements)


def _sum_of_powers(tensors: Sequence[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """Return the sum of the p-th powers of all elements; for ``inf``, the maximum, and 1 if any was nan.

    The result is float64, so that squares of float32 values neither overflow nor vanish. A maximum may lose a nan.
    """
    dtype = widest_float(device)
    norms = []
    for (_, its_dtype), group in _by_kind(tensors):
        narrow = torch.float32 if its_dtype in _NARROW else None
        norms.append(torch.stack(torch._foreach_norm(group, order, narrow)).to(device, dtype))
    if not norms:
        return torch.zeros(2 if order == inf else 1, dtype=dtype, device=device)
    stacked = torch.cat(norms)
    if order != inf:
        return stacked.pow(order).sum(0, keepdim=True)
    return torch.stack([stacked.nan_to_num(nan=0.0, posinf=inf).amax(), stacked.isnan().any().to(dtype)])


def _by_kind(tensors: Iterable[torch.Tensor]) -> list[tuple[tuple[torch.device, torch.dtype], list[torch.Tensor]]]:
    """Group by device and dtype. Empty tensors are left out: torch raises an error for the maximum of one."""
    full = [tensor for tensor in tensors if tensor.numel()]
    return group_by_key([(tensor.device, tensor.dtype) for tensor in full], full)


def _scale(tensors: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply in place, even by 1: reading the factor would wait for the device."""
    for (device, _), group in _by_kind(tensors):
        torch._foreach_mul_(group, factor.to(device))
