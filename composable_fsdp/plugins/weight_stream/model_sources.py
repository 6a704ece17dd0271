"""The parameters of a model as a stream sends them: names, distributions over axes, and this rank's shards."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from composable_fsdp._core.comm import Communicator
from composable_fsdp._core.mesh import ParameterSharding, axis_communicator
from composable_fsdp._core.params import ShardedParameter, is_wrapper, local_part, parameter_class
from composable_fsdp._core.state import state_of_parameter, states_below
from composable_fsdp._extents import has_own_memory, plain_name
from composable_fsdp.errors import ParameterError
from composable_fsdp.plugins.full_params import prepare_to_lend
from composable_fsdp.plugins.weight_stream.packed_layout import Distribution, MessageLayout, Slot
from composable_fsdp.plugins.weight_stream.weight_names import Named, Unit

__all__ = ["ModelSources", "Source", "prepare"]


def prepare(model: nn.Module, caller: str) -> dict[int, ShardedParameter]:
    """Reshard the parameters of ``model``, and return the sharded ones by ``id``.

    Raises:
        LifecycleError: a forward or backward is running, or full parameters are registered.
    """
    above = (state_of_parameter(parameter) for parameter in model.parameters())  # of a parent of ``model``
    states = list(dict.fromkeys([*states_below(model), *(state for state in above if state is not None)]))
    prepare_to_lend(states, caller)
    return {id(parameter.sharded): parameter for state in states for parameter in state.group.parameters}


@dataclass(frozen=True, slots=True)
class Source:
    """A parameter of the model.

    Args:
        tensor: the parameter, at rest.
        sharding: its sharding by ``fully_shard``, if any.
        route: the numbers of the axes over which it is gathered.
        is_sharded: the route begins with the shard axis.
        distribution: that of the tensor over the route.
        is_packed: it may hold packed values, which are never cast.
    """

    tensor: torch.Tensor
    sharding: ParameterSharding | None
    route: tuple[int, ...]
    is_sharded: bool
    distribution: Distribution
    is_packed: bool

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard."""
        return local_part(self.tensor)

    @property
    def plain(self) -> torch.Tensor:
        """This rank's shard as a plain tensor, if it is not a wrapper of others."""
        local = local_part(self.tensor)
        return local if type(local) is torch.Tensor else local.detach().as_subclass(torch.Tensor)


@dataclass
class ModelSources:
    """All parameters of a model, and the axes over which they are gathered. Names are without those of wrappers.

    Attributes:
        axes: the communicators of axes with several ranks: first shard axes, then model-parallel ones. The number of an
            axis is its index.
        names: all names of each source.
        device: where this rank computes.
        root: the global rank that is the first of the largest mesh.
    """

    axes: list[Communicator] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    names: list[Sequence[str]] = field(default_factory=list)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    root: int = 0

    @staticmethod
    def of(model: nn.Module, sharded: Mapping[int, ShardedParameter]) -> ModelSources:
        """Find those of ``model``. All ranks must call it together: an axis may get its first communicator."""
        tensors: dict[int, tuple[torch.Tensor, list[str]]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            tensors.setdefault(id(parameter), (parameter, []))[1].append(plain_name(name))
        found = ModelSources()
        axes = _Axes()
        placed = []
        for key, (tensor, _) in tensors.items():
            owner = sharded.get(key)
            sharding = None if owner is None else owner.sharding
            shard = None if sharding is None else axes.shard(sharding)
            placed.append((tensor, owner, shard, axes.inner(tensor, sharding)))
        found.axes = axes.numbered()
        for tensor, owner, shard, inner in placed:
            sharding, cuts = None if owner is None else owner.sharding, tuple(cut for _, cut in inner)
            route = tuple(found.axes.index(axis) for axis in (*(() if shard is None else (shard,)), *axes.of(inner)))
            dim, num_shards = (0, 1) if shard is None or sharding is None else (sharding.dim, shard.size)
            distribution = Distribution(tuple(tensor.shape), dim, num_shards, cuts)
            custom = parameter_class(tensor) is not nn.Parameter and not tensor.requires_grad
            is_packed = custom if owner is None else owner.is_packed
            found.sources.append(Source(tensor, sharding, route, shard is not None, distribution, is_packed))
        found.names = [names for _, names in tensors.values()]
        found._find_root(next((t for t, *_ in placed), None))
        return found

    def _find_root(self, first: torch.Tensor | None) -> None:
        meshes = dict.fromkeys(s.tensor.device_mesh for s in self.sources if isinstance(s.tensor, DTensor))
        if meshes:
            largest = max(meshes, key=lambda mesh: mesh.size())
            self.root = int(largest.mesh.flatten()[0])
        device = next((s.sharding.axes.device for s in self.sources if s.sharding is not None), None)
        if device is not None or first is not None:
            self.device = device or local_part(cast(torch.Tensor, first)).device

    @property
    def is_root(self) -> bool:
        return not dist.is_initialized() or dist.get_rank() == self.root

    def named(self, dtype: torch.dtype | None) -> list[Named]:
        """Return names, shapes and dtypes of all parameters, those of floating point as ``dtype``."""
        found = []
        for source, names in zip(self.sources, self.names, strict=True):
            local = source.local
            is_whole = type(local) is not torch.Tensor and not has_own_memory(local)
            is_kept = dtype is None or source.is_packed or is_whole or not local.dtype.is_floating_point
            sent = local.dtype if is_kept or dtype is None else dtype
            found.append(Named(names, source.distribution.shape, sent, is_whole))
        return found

    def check(self, units: Sequence[Unit], named: Sequence[Named]) -> None:
        """Check that the parameters of ``units`` can be streamed.

        Raises:
            ParameterError: one is on the meta device, is a pending sum, or of a class without ``__tensor_flatten__``.
        """
        members = [i for unit in units for i in unit.members]
        on_meta = [self.names[i][0] for i in members if self.sources[i].tensor.is_meta]
        if on_meta:
            raise ParameterError(
                f"these parameters are on the meta device and have no values to stream: {on_meta}. First call "
                "composable_fsdp.initialize(model, seed=...), or to_empty(model, device=...) and load a state dict."
            )
        for i in members:
            tensor, name = self.sources[i].tensor, self.names[i][0]
            if named[i].is_whole and not is_wrapper(local_part(tensor)):
                raise ParameterError(
                    f"parameter {name!r} is a {type(local_part(tensor)).__name__}, which has __torch_dispatch__ and no "
                    "__tensor_flatten__, so nothing says which plain tensors to stream. Give the class "
                    "__tensor_flatten__ and __tensor_unflatten__, or leave the parameter out by key_map."
                )
            if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
                raise ParameterError(
                    f"parameter {name!r} is a pending sum, placed {tensor.placements}, of which no rank has a part. "
                    "Redistribute it first, or leave it out by key_map."
                )

    def received_bytes(self, i: int, named: Named) -> int:
        """Return the bytes that the all-gathers of parameter ``i`` write, over all axes."""
        tensor = self.sources[i].distribution
        total, rows = 0, 1
        for axis in sorted(self.sources[i].route):
            rows *= self.axes[axis].size
            total += rows
        return total * tensor.padded_numel * named.dtype.itemsize

    def messages(
        self, units: Sequence[Unit], offsets: Sequence[int], named: Sequence[Named]
    ) -> tuple[list[MessageLayout], list[tuple[int, Slot]]]:
        """Return the messages of a bucket: one for each route, and a header for axes that no other uses.

        Large tensors that one axis shards evenly are not in messages. They are gathered directly into the bucket, and
        are returned with the number of the axis.
        """
        direct: list[tuple[int, Slot]] = []
        by_route: dict[tuple[tuple[int, ...], bool], list[Slot]] = {}
        for unit, offset in zip(units, offsets, strict=True):
            for i in unit.members:
                source, dtype = self.sources[i], named[i].dtype
                row_bytes = source.distribution.padded_numel * dtype.itemsize
                slot = Slot(i, dtype, source.distribution, row_bytes, offset)
                if self._is_direct(source, slot, named[i].nbytes):
                    direct.append((source.route[0], slot))
                else:
                    by_route.setdefault((source.route, source.is_sharded), []).append(slot)
                offset += named[i].nbytes
        found = [MessageLayout.of(route, is_sharded, slots) for (route, is_sharded), slots in by_route.items()]
        others = tuple(sorted(set(range(len(self.axes))) - {axis for message in found for axis in message.route}))
        return [*found, MessageLayout(others, False)] if others else found, direct

    def _is_direct(self, source: Source, slot: Slot, nbytes: int) -> bool:
        if len(source.route) != 1 or not source.is_sharded or not slot.tiles_rows:
            return False
        return nbytes >= max(1, self.axes[source.route[0]].traits.zero_copy_min_bytes)

    def shard_in(self, slot: Slot, row: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard as bytes: where it is, or cast or moved to ``row``, its place in a bucket."""
        local = self.sources[slot.source].plain
        if local.dtype == slot.dtype and local.device == row.device and local.is_contiguous():
            return local.reshape(-1).view(torch.uint8)
        row.view(slot.dtype).copy_(local.reshape(-1), non_blocking=True)
        return row

    def pack(self, message: MessageLayout, row: torch.Tensor) -> None:
        """Copy this rank's shards to ``row``, cast to their dtypes. Padding is not written."""
        run: list[torch.Tensor] = []
        key: Hashable = None
        begin, end, dtype = 0, 0, torch.uint8
        for slot in message.slots:
            local = self.sources[slot.source].plain
            numel = local.numel()
            if not numel:
                continue
            own = local.dtype, slot.dtype, local.device
            casts = local.dtype != slot.dtype and end + local.nbytes - begin > _MOST_CAST_BYTES
            if run and (own != key or slot.offset != end or casts):
                _copy_run(run, row[begin:end].view(dtype))
                run = []
            if not run:
                begin, key, dtype = slot.offset, own, slot.dtype
            run.append(local.reshape(-1))
            end = slot.offset + numel * dtype.itemsize
        if run:
            _copy_run(run, row[begin:end].view(dtype))


_MOST_CAST_BYTES = 1 << 17
"""The most bytes of several tensors that are put together before they are cast."""


def _copy_run(tensors: list[torch.Tensor], out: torch.Tensor) -> None:
    """Copy 1-d ``tensors`` of one dtype and device to ``out``, one after the other."""
    if len(tensors) > 1 and (tensors[0].dtype, tensors[0].device) == (out.dtype, out.device):
        torch.cat(tensors, out=out)
    else:  # a concatenation that casts takes four times as long
        out.copy_(tensors[0] if len(tensors) == 1 else torch.cat(tensors), non_blocking=True)


class _Axes:
    """The axes of several ranks that parameters of a model are placed on."""

    def __init__(self) -> None:
        self._shard: dict[int, Communicator | None] = {}
        self._inner: dict[tuple[DeviceMesh, int], Communicator] = {}

    def shard(self, sharding: ParameterSharding) -> Communicator | None:
        """Return the shard axis, or ``None`` if it has one rank."""
        key = id(sharding.axes)
        if key not in self._shard:
            axis = sharding.axes.shard
            self._shard[key] = axis if axis.size > 1 else None
        return self._shard[key]

    def inner(
        self, tensor: torch.Tensor, sharding: ParameterSharding | None
    ) -> list[tuple[tuple[DeviceMesh, int], tuple[int, int, int]]]:
        """Return the model-parallel axes that cut ``tensor``, each with dim, ranks and blocks."""
        if sharding is not None:
            inner = sharding.inner
            return [] if inner is None else list(self._cuts(inner.mesh, inner.placements))
        return list(self._cuts(tensor.device_mesh, tensor.placements)) if isinstance(tensor, DTensor) else []

    def _cuts(
        self, mesh: DeviceMesh, placements: Sequence[Placement]
    ) -> Iterator[tuple[tuple[DeviceMesh, int], tuple[int, int, int]]]:
        for axis, placement in enumerate(placements):
            if mesh.size(axis) > 1 and not placement.is_replicate() and not placement.is_partial():
                if (mesh, axis) not in self._inner:
                    self._inner[mesh, axis] = axis_communicator(mesh, axis)
                cut: Any = placement
                yield (mesh, axis), (cut.dim, mesh.size(axis), getattr(cut, "split_factor", 1))

    def of(self, inner: Sequence[tuple[tuple[DeviceMesh, int], object]]) -> list[Communicator]:
        return [self._inner[key] for key, _ in inner]

    def numbered(self) -> list[Communicator]:
        shards = [axis for axis in self._shard.values() if axis is not None]
        return list(dict.fromkeys([*shards, *self._inner.values()]))
