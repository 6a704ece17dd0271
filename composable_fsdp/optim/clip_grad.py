"""Gradient clipping over any mixture of plain tensors and DTensors, on any meshes, with any placements.

The p-norm of a tensor cut over some mesh axes is the p-norm of its shards' norms. So every rank sums the p-th powers of
its local norms, one number per *cut* (a mesh and the axes of it over which tensors are cut), and each mesh axis then
needs one all-reduce, which carries the numbers of all cuts that include it. Replicated and plain tensors need none.

Invariant: which collectives a rank makes follows from meshes and placements alone, which are the same on every rank;
never from local shards (which may be empty) nor from which gradients are there.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from composable_fsdp._runtime.shard_extent import states_below
from composable_fsdp.errors import ConfigurationError, GradientError, MeshError

__all__ = ["clip_grad_norm_", "get_total_norm"]

Tensors = torch.Tensor | Iterable[torch.Tensor]

_NARROW = (torch.float16, torch.bfloat16)
"""dtypes whose sums and norms are computed in float32."""


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scales gradients in place so that their total norm, over all ranks, is at most ``max_norm``.

    What ``torch.nn.utils.clip_grad_norm_`` is for one process: the norm is that of all full gradients concatenated.
    Gradients may be plain tensors or DTensors on any meshes, each counted once. Every rank of the meshes must call it
    with the same parameters; a gradient may be ``None`` on some ranks only. Gradients of plain parameters must be the
    same on every rank.

    Args:
        parameters: a module, a parameter, or parameters.
        max_norm: the largest total norm that stays as it is.
        norm_type: order of the norm, positive; ``inf`` is the largest absolute value.
        error_if_nonfinite: raise where the total norm is nan or infinite, instead of scaling by it.
        foreach: ``False`` works tensor by tensor; everything else with torch's ``_foreach`` operations.

    Returns:
        The total norm before clipping: a plain 0-d tensor on the first gradient's device, the same on every rank. It is
        float64 if any gradient is, else float32, also for gradients of lower precision.

    Raises:
        ConfigurationError: ``norm_type`` is not positive.
        GradientError: the norm is not finite, with ``error_if_nonfinite``. On every rank alike.
        MeshError: this rank is not in the mesh of a gradient.
    """
    items = _parameters(parameters)
    places = [(p if g is None else g, g) for p in items if (g := p.grad) is not None or p.requires_grad]
    total = _total_norm(places, norm_type, foreach is not False)
    if error_if_nonfinite:
        _check_finite(total, norm_type)
    gradients = [_local(g) for _, g in places if g is not None]
    _scale(gradients, torch.clamp(float(max_norm) / (total + 1e-6), max=1.0), foreach is not False)
    return total


@torch.no_grad()
def get_total_norm(tensors: Tensors, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> torch.Tensor:
    """The norm of all ``tensors`` concatenated, over all ranks, as :func:`clip_grad_norm_` works it out.

    Args:
        tensors: gradients or other tensors, plain ones and DTensors; the same ones on every rank of their meshes.
        norm_type: order of the norm, positive; ``inf`` is the largest absolute value.
        error_if_nonfinite: raise where the result is nan or infinite.

    Returns:
        A plain 0-d tensor, the same on every rank; float64 if any of ``tensors`` is, else float32.

    Raises:
        ConfigurationError: ``norm_type`` is not positive.
        GradientError: the norm is not finite, with ``error_if_nonfinite``. On every rank alike.
    """
    items = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    total = _total_norm([(item, item) for item in items], norm_type, foreach=True)
    if error_if_nonfinite:
        _check_finite(total, norm_type)
    return total


def _parameters(parameters: nn.Module | Tensors) -> list[torch.Tensor]:
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    if isinstance(parameters, nn.Module):
        return _parameters_at_rest(parameters)
    items = list(parameters)
    if not items and isinstance(parameters, types.GeneratorType):
        warnings.warn("clip_grad_norm_ was given an exhausted generator, so it clips nothing.", stacklevel=4)
    return items


def _parameters_at_rest(module: nn.Module) -> list[torch.Tensor]:
    """Each parameter once; where a unit shows its unsharded ones, the sharded ones, which have the gradients."""
    at_rest = {id(p.unsharded): p.sharded for state in states_below(module) for p in state.group.parameters}
    return list(dict.fromkeys(at_rest.get(id(p), p) for p in module.parameters()))


# -- the norm


@dataclass(frozen=True)
class _Cut:
    """The axes of ``mesh`` over which a tensor is cut; none for a plain or replicated one."""

    mesh: DeviceMesh | None = None
    axes: tuple[int, ...] = ()


@dataclass
class _Exchange:
    """One all-reduce: over which group and on which device, and which cuts have a number in it."""

    group: dist.ProcessGroup
    device: str
    cuts: list[int] = field(default_factory=list)


Place = tuple[torch.Tensor, torch.Tensor | None]
"""A tensor whose mesh and placements are the same on every rank, and the one to count that lies so, if there is any."""


def _total_norm(places: Sequence[Place], norm_type: float, foreach: bool) -> torch.Tensor:
    """The norm of the tensors at ``places``."""
    order = float(norm_type)
    if not order > 0:
        raise ConfigurationError(f"norm_type must be positive or inf, not {norm_type!r}.")
    shards = _by_cut(places)
    tensors = [tensor for part in shards.values() for tensor in part]
    here = next((_local(tensor).device for _, tensor in places if tensor is not None), torch.device("cpu"))
    wide = any(t.dtype in (torch.float64, torch.complex128) for t in tensors)
    sums = [_sum_of_powers(part, order, foreach, here) for part in shards.values()]
    total = torch.stack(sums) if sums else torch.zeros(0, 2, device=here)
    for exchange in _exchanges(list(shards)):
        numbers = total[exchange.cuts].to(exchange.device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX if order == inf else dist.ReduceOp.SUM, exchange.group)
        total[exchange.cuts] = numbers.to(here)
    return _from_powers(total, order).to(torch.float64 if wide else torch.float32)


def _by_cut(places: Sequence[Place]) -> dict[_Cut, list[torch.Tensor]]:
    """The local parts of the tensors, by how they are cut. That is worked out once for all that are placed alike."""
    shards: dict[_Cut, list[torch.Tensor]] = {}
    known: dict[object, tuple[list[torch.Tensor], bool]] = {}
    for like, tensor in places:
        placement = (like.device_mesh, like.placements) if isinstance(like, DTensor) else None
        if placement not in known:
            pending = isinstance(like, DTensor) and any(p.is_partial() for p in like.placements)
            known[placement] = shards.setdefault(_cut(like), []), pending
        part, pending = known[placement]
        if tensor is not None:
            part.append(_local(_summed(tensor) if pending else tensor))
    return shards


def _cut(tensor: torch.Tensor) -> _Cut:
    if not isinstance(tensor, DTensor):
        return _Cut()
    mesh = tensor.device_mesh
    if mesh.get_coordinate() is None:
        raise MeshError(
            f"a gradient of shape {tuple(tensor.shape)} is on the mesh {mesh.mesh.tolist()}, which rank "
            f"{dist.get_rank()} is not in. Pass only gradients whose mesh has this rank."
        )
    axes = tuple(
        axis
        for axis, placement in enumerate(tensor.placements)
        if not placement.is_replicate() and not placement.is_partial() and mesh.size(axis) > 1
    )
    return _Cut(mesh, axes) if axes else _Cut()


def _exchanges(cuts: Sequence[_Cut]) -> list[_Exchange]:
    """One per distinct set of ranks, in the order in which an axis first has them.

    All ranks of a set find the same cuts for it, at the same place in the order, so no two ranks wait for each other.
    """
    exchanges: dict[tuple[str, tuple[int, ...]], _Exchange] = {}
    for index, cut in enumerate(cuts):
        for axis in cut.axes:
            assert cut.mesh is not None
            group, device = cut.mesh.get_group(axis), cut.mesh.device_type
            key = (device, tuple(dist.get_process_group_ranks(group)))
            exchanges.setdefault(key, _Exchange(group, device)).cuts.append(index)
    return list(exchanges.values())


def _summed(tensor: torch.Tensor) -> torch.Tensor:
    """The DTensor ``tensor`` with pending sums carried out, in float32 where it is narrower. Collective."""
    assert isinstance(tensor, DTensor)
    placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
    wide = cast(DTensor, tensor.to(torch.float32)) if tensor.dtype in _NARROW else tensor
    return wide.redistribute(placements=placements)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sum_of_powers(tensors: Sequence[torch.Tensor], order: float, foreach: bool, device: torch.device) -> torch.Tensor:
    """The sum of the p-th powers of all elements; or the largest one, and 1 if any was nan, which a maximum may lose.

    float64, so that squares of what float32 can hold neither overflow nor vanish.
    """
    dtype = torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
    norms = [
        torch.stack(tuple(_norms(group, order, foreach))).to(device, dtype)
        for group in _by_device_and_dtype(tensors).values()
    ]
    if not norms:
        return torch.zeros(2 if order == inf else 1, dtype=dtype, device=device)
    stacked = torch.cat(norms)
    if order != inf:
        return stacked.pow(order).sum(0, keepdim=True)
    return torch.stack([stacked.nan_to_num(nan=0.0, posinf=inf).amax(), stacked.isnan().any().to(dtype)])


def _from_powers(sums: torch.Tensor, order: float) -> torch.Tensor:
    if not len(sums):
        return sums.new_zeros(())
    if order == inf:
        return torch.where(sums[:, 1].any(), sums.new_full((), torch.nan), sums[:, 0].amax())
    return sums.sum().pow(1.0 / order)


def _norms(tensors: list[torch.Tensor], order: float, foreach: bool) -> Sequence[torch.Tensor]:
    """The norm of each, none of them empty, in float32 where the tensors are narrower."""
    dtype = torch.float32 if tensors[0].dtype in _NARROW else None
    if foreach:
        return torch._foreach_norm(tensors, order, dtype)
    return [torch.linalg.vector_norm(t, order, dtype=dtype) for t in tensors]


def _by_device_and_dtype(
    tensors: Iterable[torch.Tensor],
) -> Mapping[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Those that are not empty: a largest element of nothing is an error to torch."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups


# -- what is done with it


def _check_finite(total: torch.Tensor, norm_type: float) -> None:
    if not torch.isfinite(total):
        raise GradientError(
            f"the total norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped. "
            "composable_fsdp.find_nonfinite(model), called on all ranks, names the parameters at fault. Skip this "
            "step (zero_grad, no optimizer step), lower the learning rate or the loss scale, or pass "
            "error_if_nonfinite=False to scale by it anyway."
        )


def _scale(tensors: Iterable[torch.Tensor], factor: torch.Tensor, foreach: bool) -> None:
    """Multiplies in place. Not skipped where the factor is 1: to look at it would wait for the device."""
    for (device, _), group in _by_device_and_dtype(tensors).items():
        here = factor.to(device)
        if foreach:
            torch._foreach_mul_(group, here)
        else:
            for tensor in group:
                tensor.mul_(here)
