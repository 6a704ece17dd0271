"""Which block of a full tensor this rank holds, and names of parameters below a module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from composable_fsdp._core.comm import Collective, Transfer
from composable_fsdp._core.layout import ShardLayout, TensorShards
from composable_fsdp._core.mesh import ParameterSharding
from composable_fsdp._core.params import local_part, plain_tensors
from composable_fsdp._core.state import FSDPState, states_below

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    **{f"U{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
}
"""Dtypes by their names in the format safetensors."""

Ranges = tuple[range, ...]

_WRAPPERS = re.compile(r"(?<![^.])(?:_checkpoint_wrapped_module|_orig_mod)\.")
"""The components that torch's activation-checkpoint wrappers and ``torch.compile`` add to names."""


def plain_name(name: str) -> str:
    return _WRAPPERS.sub("", name)


class Cut(NamedTuple):
    """One mesh axis that shards one tensor dim by the rule of ``torch.chunk``: chunk ``rank`` of ``ranks`` remains.

    With ``blocks`` above one the dim is first split into that many blocks, and each block is chunked. That is DTensor's
    strided sharding.
    """

    dim: int
    ranks: int
    rank: int
    blocks: int = 1


class Box(NamedTuple):
    """A contiguous block of ``sizes`` elements per dim.

    It starts at ``offsets`` in the full tensor and at ``local_offsets`` in the local shard.
    """

    offsets: tuple[int, ...]
    local_offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of this block in the full tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))

    def of_part(self, part: torch.Tensor) -> torch.Tensor:
        """Return the view of this block in ``part``, the local shard of a rank."""
        for dim, (offset, size) in enumerate(zip(self.local_offsets, self.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        return part

    def pieces(self, shape: tuple[int, ...], limit: int) -> Iterator[Box]:
        """Yield smaller boxes that tile this one, in memory order.

        Each spans at most ``limit`` elements of the full tensor of ``shape``, from its first element to its last in
        memory, or is a single element. A box without elements yields itself.
        """
        dim = next((d for d, size in enumerate(self.sizes) if size > 1), None)
        if dim is None or 0 in self.sizes:
            yield self
            return
        stride = prod(shape[dim + 1 :])
        step = max(1, limit // stride)
        for start in range(0, self.sizes[dim], step):
            offsets, local_offsets, sizes = map(list, self)
            offsets[dim] += start
            local_offsets[dim] += start
            sizes[dim] = min(step, sizes[dim] - start)
            piece = Box(tuple(offsets), tuple(local_offsets), tuple(sizes))
            if stride > limit:
                yield from piece.pieces(shape, limit)
            else:
                yield piece

    def runs(self, shape: tuple[int, ...]) -> tuple[int, Iterator[int]]:
        """Return the length of the contiguous runs of this box in a full tensor of ``shape``, and where each run
        begins.

        All runs have the same length. Lengths and offsets are in elements; the offsets are in the order of the box's
        elements.
        """
        dim = len(shape)
        while dim > 0 and self.sizes[dim - 1] == shape[dim - 1]:
            dim -= 1
        cut = max(0, dim - 1)
        strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
        steps = [range(o * s, (o + n) * s, s) for o, n, s in zip(self.offsets, self.sizes, strides, strict=True)]
        first = sum(r.start for r in steps[cut:])
        return prod(self.sizes[cut:]), (first + sum(at) for at in product(*steps[:cut]))


@dataclass(frozen=True, slots=True)
class ShardExtent:
    """The part of a tensor of ``shape`` that one rank holds.

    Invariant: in each dim the ``ranges`` are disjoint, ascending, not empty and not adjacent. The part is the product
    of the dims' ranges, in that order.
    """

    shape: tuple[int, ...]
    ranges: tuple[Ranges, ...]

    @staticmethod
    def after(shape: tuple[int, ...], cuts: Iterable[Cut] = ()) -> ShardExtent:
        """Return what remains of a tensor of ``shape`` after ``cuts``, applied in order."""
        ranges: list[Ranges] = [(range(length),) if length else () for length in shape]
        for cut in cuts:
            ranges[cut.dim] = _cut(ranges[cut.dim], cut)
        return ShardExtent(tuple(shape), tuple(ranges))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the local shard."""
        return tuple(sum(map(len, ranges)) for ranges in self.ranges)

    @property
    def is_empty(self) -> bool:
        """True if the rank holds no element."""
        return 0 in self.local_shape

    def boxes(self) -> Iterator[Box]:
        """Yield the blocks that tile the local shard. A scalar is one block without dims."""
        for blocks in product(*map(_with_local_offsets, self.ranges)):
            offsets, local_offsets, sizes = zip(*blocks, strict=True) if blocks else ((), (), ())
            yield Box(offsets, local_offsets, sizes)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the full tensor ``whole``: a view if the part is one block, else a copy."""
        for dim, ranges in enumerate(self.ranges):
            pieces = [whole.narrow(dim, r.start, len(r)) for r in ranges or (range(0),)]
            whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
        return whole


def _cut(ranges: Ranges, cut: Cut) -> Ranges:
    blocks = ShardLayout(sum(map(len, ranges)), cut.blocks)
    kept: list[range] = []
    for i in range(cut.blocks):
        block = blocks.owned_by(i)
        piece = ShardLayout(len(block), cut.ranks).owned_by(cut.rank)
        kept += _slice(ranges, block.start + piece.start, len(piece))
    return _joined(kept)


def _slice(ranges: Ranges, start: int, length: int) -> Iterator[range]:
    """Yield the ranges of ``length`` elements, counted along ``ranges`` from the ``start``-th element."""
    for each in ranges:
        inside = each[start : start + length]
        if inside:
            yield inside
        length -= len(inside)
        start = max(0, start - len(each))


def _joined(ranges: Iterable[range]) -> Ranges:
    """Return ``ranges`` with adjacent ones merged."""
    joined: list[range] = []
    for each in ranges:
        if joined and joined[-1].stop == each.start:
            each = range(joined.pop().start, each.stop)
        joined.append(each)
    return tuple(joined)


def _with_local_offsets(ranges: Ranges) -> Iterator[tuple[int, int, int]]:
    offset = 0
    for each in ranges:
        yield each.start, offset, len(each)
        offset += len(each)


def parameters_at_rest(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of ``module`` by name. Sharded ones are in their sharded form, which has the gradient."""
    at_rest = {id(p.unsharded): p.sharded for state in states_below(module) for p in state.group.parameters}
    return {name: at_rest.get(id(p), p) for name, p in module.named_parameters()}


def shardings_of(states: Iterable[FSDPState]) -> dict[int, ParameterSharding]:
    """Return the shardings of the sharded parameters of ``states``, by the ``id`` of the parameter."""
    return {id(p.sharded): p.sharding for state in states for p in state.group.parameters}


def has_own_memory(tensor: torch.Tensor) -> bool:
    """Return True if ``tensor`` stores its own values, i.e. its class has no ``__torch_dispatch__``."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def extent_of(tensor: torch.Tensor, sharding: ParameterSharding | None = None) -> ShardExtent:
    """Return the extent of ``tensor`` on this rank: all of a plain tensor, none of a DTensor on another mesh.

    Args:
        tensor: a parameter, or a tensor with its shape and placements, such as a gradient or an optimizer state.
        sharding: the sharding of the parameter, if ``fully_shard`` made it.
    """
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return ShardExtent.after(shape)
    if tensor.device_mesh.get_coordinate() is None:
        return ShardExtent(shape, ((),) * len(shape))
    if sharding is None or not _is_placed_by(tensor, sharding):
        return ShardExtent.after(shape, _cuts(tensor.device_mesh, tensor.placements))
    shard = sharding.axes.shard
    return ShardExtent.after(shape, [*_inner_cuts(sharding), Cut(sharding.dim, shard.size, shard.rank)])


def gather(tensor: torch.Tensor, sharding: ParameterSharding | None = None) -> torch.Tensor:
    """Return the full ``tensor`` on the device of its mesh. All ranks must call this.

    Args:
        tensor: as for :func:`extent_of`; it may be on another device, e.g. in host memory.
        sharding: as for :func:`extent_of`.

    The result may share memory with ``tensor`` if this rank has all of it.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    sharded = cast(DTensor, tensor.detach())
    local, mesh = sharded.to_local(), sharded.device_mesh
    if local.device.type != mesh.device_type:
        sharded = cast(DTensor, like(sharded, local := local.to(mesh.device_type)))
    if sharding is None or not _is_placed_by(sharded, sharding) or type(local) is not torch.Tensor:
        return sharded.full_tensor()
    full = _all_gather_shards(local, sharding)
    inner = sharding.inner
    return full if inner is None else inner.wrap(full).full_tensor()


def assemble_full(tensor: torch.Tensor, sharding: ParameterSharding | None, offload_to_cpu: bool) -> torch.Tensor:
    """Return the full value in its own memory, even if this rank has all of it. For arguments see :func:`gather`."""
    local, full = local_part(tensor).detach(), gather(tensor.detach(), sharding)
    if offload_to_cpu:
        full = full.cpu()
    return full.clone() if storage_addresses(full) & storage_addresses(local) else full


def storage_addresses(tensor: torch.Tensor) -> set[int]:
    return {plain.untyped_storage().data_ptr() for plain in plain_tensors(tensor)}


def like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return ``local`` as the local tensor of a DTensor with the placements of ``tensor``, or itself if that is plain.

    ``DTensor.from_local`` would move it to the device of the mesh, which offloaded shards are not on.
    """
    if not isinstance(tensor, DTensor):
        return local
    spec = cast(Any, tensor)._spec
    return DTensor(local, replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype)), requires_grad=False)


def _is_placed_by(tensor: DTensor, sharding: ParameterSharding) -> bool:
    return (
        tuple(tensor.shape) == sharding.shape
        and tensor.placements == sharding.placements
        and tensor.device_mesh == sharding.mesh
    )


def _inner_cuts(sharding: ParameterSharding) -> Iterator[Cut]:
    if sharding.inner is not None:
        yield from _cuts(sharding.inner.mesh, sharding.inner.placements)


def _cuts(mesh: DeviceMesh, placements: Sequence[Placement]) -> Iterator[Cut]:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(placements):
        if not placement.is_replicate():
            dim = cast(Shard, placement).dim
            yield Cut(dim, mesh.size(axis), coordinate[axis], getattr(placement, "split_factor", 1))


def _all_gather_shards(local: torch.Tensor, sharding: ParameterSharding) -> torch.Tensor:
    """All-gather the shards of the shard axis. They are sent as bytes, since not every backend supports every dtype."""
    axis = sharding.axes.shard
    shards = TensorShards(ShardExtent.after(sharding.shape, _inner_cuts(sharding)).local_shape, sharding.dim, axis.size)
    if axis.size == 1:
        return local
    message = F.pad(local.reshape(-1).view(torch.uint8), (0, shards.padded_numel * local.itemsize - local.nbytes))
    received = message.new_empty(axis.size * message.numel())
    axis.launch(Collective.ALL_GATHER, [Transfer(received, message)]).wait()
    pieces = received.view(local.dtype).view(axis.size, shards.padded_numel)
    if shards.concatenates:
        return pieces.view(-1)[: shards.numel].view(shards.shape)
    shapes = [shards.shard_shape(rank) for rank in range(axis.size)]
    return torch.cat([row[: prod(s)].view(s) for row, s in zip(pieces, shapes, strict=True)], sharding.dim)
