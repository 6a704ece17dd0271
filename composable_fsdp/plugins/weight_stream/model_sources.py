"""The parameters of a model as a stream sends them: names, distributions over axes, and this rank's shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable_fsdp._core.comm import Communicator
from composable_fsdp._core.mesh import ParameterSharding, axis_communicator
from composable_fsdp._core.params import ShardedParameter, is_wrapper, local_part, parameter_class
from composable_fsdp._core.state import state_of_parameter, states_below
from composable_fsdp._extents import has_own_memory, plain_name
from composable_fsdp.errors import ParameterError
from composable_fsdp.plugins.full_params import prepare_to_lend
from composable_fsdp.plugins.weight_stream.packed_layout import Distribution, MessageLayout
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


class Source(NamedTuple):
    """A parameter of the model.

    Args:
        names: all its names.
        tensor: the parameter, at rest.
        sharding: its sharding by ``fully_shard``, if any.
        route: the numbers of the axes over which it is gathered, in the order of the cuts of its distribution.
        distribution: that of the tensor over the route, in the dtype that is sent.
    """

    names: Sequence[str]
    tensor: torch.Tensor
    sharding: ParameterSharding | None
    route: tuple[int, ...]
    distribution: Distribution

    @property
    def is_wrapped(self) -> bool:
        """Its class wraps other tensors, and gathers it."""
        return not has_own_memory(local_part(self.tensor))

    @property
    def plain(self) -> torch.Tensor:
        """This rank's shard as a plain tensor."""
        local = local_part(self.tensor)
        return local if type(local) is torch.Tensor else local.detach().as_subclass(torch.Tensor)


@dataclass(frozen=True)
class ModelSources:
    """All parameters of a model, and the axes over which they are gathered. Names are without those of wrappers.

    Attributes:
        axes: the communicators of axes with several ranks. The number of an axis is its index.
        sources: the parameters.
        device: where this rank computes.
        is_root: this is the first rank of the largest mesh.
    """

    axes: Sequence[Communicator]
    sources: Sequence[Source]
    device: torch.device
    is_root: bool

    @staticmethod
    def of(model: nn.Module, dtype: torch.dtype | None, sharded: Mapping[int, ShardedParameter]) -> ModelSources:
        """Find those of ``model``. All ranks must call it together: an axis may get its first communicator.

        Args:
            model: the model.
            dtype: that in which parameters of floating point are sent; ``None``: their own.
            sharded: the sharded parameters by ``id``.
        """
        named: dict[int, tuple[torch.Tensor, list[str]]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            named.setdefault(id(parameter), (parameter, []))[1].append(plain_name(name))
        numbers: dict[Communicator, int] = {}
        sources = []
        for key, (tensor, names) in named.items():
            owner, local = sharded.get(key), local_part(tensor)
            sharding = None if owner is None else owner.sharding
            inner: Any = None if sharding is None else sharding.inner
            if sharding is None and isinstance(tensor, DTensor):
                inner = tensor._spec
            cuts, route = [], []
            for dim, placement in enumerate(() if inner is None else inner.placements):
                if inner.mesh.size(dim) > 1 and not placement.is_replicate() and not placement.is_partial():
                    cuts.append((placement.dim, inner.mesh.size(dim), getattr(placement, "split_factor", 1)))
                    route.append(axis_communicator(inner.mesh, dim))
            if sharding is not None and sharding.axes.shard.size > 1:
                cuts.append((sharding.dim, sharding.axes.shard.size, 1))
                route.append(sharding.axes.shard)
            is_packed = parameter_class(tensor) is not nn.Parameter and not tensor.requires_grad
            keeps = is_packed if owner is None else owner.is_packed  # packed values are never cast
            sent = local.dtype if dtype is None or keeps or not local.is_floating_point() else dtype
            distribution = Distribution(tuple(tensor.shape), sent, tuple(cuts))
            own = tuple(numbers.setdefault(axis, len(numbers)) for axis in route)
            sources.append(Source(names, tensor, sharding, own, distribution))
        meshes = [source.tensor.device_mesh for source in sources if isinstance(source.tensor, DTensor)]
        first = int(max(meshes, key=lambda mesh: mesh.size()).mesh.flatten()[0]) if meshes else 0
        devices = [source.sharding.axes.device for source in sources if source.sharding is not None]
        devices += [local_part(source.tensor).device for source in sources[:1]]
        is_root = not dist.is_initialized() or dist.get_rank() == first
        return ModelSources(list(numbers), sources, (*devices, torch.device("cpu"))[0], is_root)

    def named(self) -> list[Named]:
        """Return names, shapes and dtypes of all parameters."""
        return [Named(each.names, each.distribution.shape, each.distribution.dtype) for each in self.sources]

    def check(self, units: Sequence[Unit]) -> None:
        """Check that the parameters of ``units`` can be streamed.

        Raises:
            ParameterError: some are on the meta device, a pending sum, or of a class that cannot be taken apart.
        """
        chosen = [
            (self.sources[i], len(unit.members) == len(unit.tensors) == 1) for unit in units for i in unit.members
        ]
        on_meta = [source.names[0] for source, _ in chosen if source.tensor.is_meta]
        if on_meta:
            raise ParameterError(
                f"these parameters are on the meta device and have no values to stream: {on_meta}. First call "
                "composable_fsdp.initialize(model, seed=...), or to_empty(model, device=...) and load a state dict."
            )
        for source, is_renamed in chosen:
            local = local_part(source.tensor)
            if source.is_wrapped and not (is_renamed and is_wrapper(local)):
                raise ParameterError(
                    f"parameter {source.names[0]!r} is a {type(local).__name__}, a class with __torch_dispatch__: it "
                    "can be neither joined nor split, and needs __tensor_flatten__, which says what to stream. Leave "
                    "it out by key_map."
                )
            if isinstance(source.tensor, DTensor) and any(each.is_partial() for each in source.tensor.placements):
                raise ParameterError(
                    f"parameter {source.names[0]!r} is a pending sum, placed {source.tensor.placements}, of which no "
                    "rank has a part. Redistribute it first, or leave it out by key_map."
                )

    def received_bytes(self, source: Source) -> int:
        """Return the bytes that the all-gathers of a parameter write, over all axes."""
        total, rows = 0, 1
        for axis in sorted(source.route):
            rows *= self.axes[axis].size
            total += rows
        return total * source.distribution.row_bytes


_MOST_CAST_BYTES = 1 << 17
"""The most bytes of several tensors that are put together before they are cast."""


def pack(message: MessageLayout, row: torch.Tensor) -> None:
    """Copy this rank's shards of ``message`` to ``row``, cast to their dtypes. Padding is not written."""
    run: list[torch.Tensor] = []
    begin, end, dtype = 0, 0, torch.uint8
    for slot in message.slots:
        local, sent = slot.source.plain, slot.tensor.dtype
        if not local.numel():
            continue
        goes_on = run and (run[0].dtype, run[0].device, dtype, end) == (local.dtype, local.device, sent, slot.offset)
        if not goes_on or (local.dtype != sent and end + local.nbytes - begin > _MOST_CAST_BYTES):
            _copy_run(run, row[begin:end].view(dtype))
            run, begin, dtype = [], slot.offset, sent
        run.append(local.reshape(-1))
        end = slot.offset + local.numel() * sent.itemsize
    _copy_run(run, row[begin:end].view(dtype))


def _copy_run(tensors: list[torch.Tensor], out: torch.Tensor) -> None:
    """Copy 1-d ``tensors`` of one dtype and device to ``out``, one after the other."""
    if len(tensors) > 1 and (tensors[0].dtype, tensors[0].device) == (out.dtype, out.device):
        torch.cat(tensors, out=out)
    elif tensors:  # a concatenation that casts takes four times as long
        out.copy_(tensors[0] if len(tensors) == 1 else torch.cat(tensors), non_blocking=True)
