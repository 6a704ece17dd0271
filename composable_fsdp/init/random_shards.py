"""``sharded_rng``: random operations on shards that give each rank its shard of the unsharded tensor's values.

On CPU, torch's own ``DTensor`` draws a shard from the rank's generator, so that ranks with one seed draw equal shards.
On accelerators each shard starts at another offset: shards differ, but depend on the number of shards.

Invariant: an operation on a full tensor advances the generator as it does without sharding, on every rank. So the
generators of all ranks stay equal.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast
from zlib import crc32

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from composable_fsdp._api.extents import ShardExtent, extent_of, like, states_below
from composable_fsdp._core.params import ShardedParameter, local_part
from composable_fsdp._core.state import FSDPState
from composable_fsdp.errors import UnsupportedError

__all__ = ["sharded_rng"]

IN_PLACE = frozenset(
    f"aten::{name}_"
    for name in ("normal", "uniform", "exponential", "cauchy", "log_normal", "geometric", "random", "bernoulli")
)
LIKE = frozenset({"aten::rand_like", "aten::randn_like", "aten::randint_like"})
"""Operations that depend only on the shape and dtype of their first argument."""


@contextmanager
def sharded_rng(model: nn.Module, seed: int) -> Iterator[None]:
    """Make random operations on sharded parameters give each rank its shard of the unsharded parameter's values.

    Supported are operations that fill a tensor in place (``normal_``, ``uniform_``, ``exponential_``, ``cauchy_``,
    ``log_normal_``, ``geometric_``, ``random_``, ``bernoulli_``) or make one like another (``rand_like``,
    ``randn_like``, ``randint_like``), and ``torch.nn.init``, which uses them. Their argument is any ``DTensor``, or the
    local tensor of a sharded parameter of ``model``. Each rank draws the values of the full tensor, which takes its
    memory, and keeps its shard. The values are those of the same calls on the unsharded model after
    ``torch.manual_seed(seed)``, on any mesh. Every rank must make the same calls, replicas too. Nothing is
    communicated, unless a number is read from a sharded tensor, as ``nn.init.trunc_normal_`` does: it is then read from
    the full tensor, on every rank.

    A random operation on a slice of a local tensor draws from a generator stream of that shard: other shards get other
    values, replicas the same, and the values depend on the number of ranks. Other plain tensors get the same values on
    all ranks. The generators of the CPU and of the mesh's device are seeded, and restored at the end. Those of Python
    and NumPy are unchanged.

    Args:
        model: a module that contains sharded ones. Otherwise the generators are seeded and restored only.
        seed: the same on every rank.

    Raises:
        UnsupportedError: another random operation ran on a sharded tensor, such as dropout; or one ran on an empty
            local tensor that cannot be matched to a parameter.
    """
    states = states_below(model)
    with seeded(states, seed), ShardedRandom(states, seed):
        yield


@contextmanager
def seeded(states: Sequence[FSDPState], seed: int) -> Iterator[None]:
    """Seed the generators of the CPU and of the devices of ``states``, and restore them at the end."""
    devices = dict.fromkeys([torch.device("cpu"), *(state.group.axes.device for state in states)])
    generators = [default_generator(device) for device in devices]
    before = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, old in zip(generators, before, strict=True):
            generator.set_state(old)


class ShardedRandom(TorchDispatchMode):
    """Dispatch mode that runs random operations on shards as :func:`sharded_rng` says.

    Args:
        states: FSDP states, which know how their parameters are sharded. For other DTensors their placements apply.
        seed: the seed of the streams for slices.
        on_write: called with every tensor that any operation writes to.
    """

    def __init__(
        self, states: Sequence[FSDPState], seed: int, on_write: Callable[[torch.Tensor], object] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed, self._on_write = seed, on_write
        parameters = [parameter for state in states for parameter in state.group.parameters]
        self._shardings = {(p.sharding.shape, p.sharding.mesh, p.sharding.placements): p.sharding for p in parameters}
        self._shards = _Shards(parameters)
        self._streams: dict[tuple[ShardExtent, torch.device], torch.Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._on_write is not None and func._schema.is_mutable:
            self._report_writes(func, args, kwargs)
        if not args:
            return func(*args, **kwargs)
        first, name = args[0], func._schema.name
        if name == "aten::_local_scalar_dense" and isinstance(first, DTensor):
            # Read from the full tensor, or ranks would diverge: trunc_normal_ draws again until all values fit.
            return func(first.full_tensor())
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name in IN_PLACE | LIKE and len(tensors) == 1 and tensors[0] is first:
            return self._fill(func, first, args[1:], kwargs)
        if any(isinstance(tensor, DTensor) for tensor in tensors):
            raise UnsupportedError(
                f"sharded_rng: {name} was called on a sharded tensor. Only operations that fill a tensor or make one "
                f"alike are known there: {', '.join(sorted(each.removeprefix('aten::') for each in IN_PLACE | LIKE))}."
                " For a mask, draw rand_like(tensor) and compare it with a number."
            )
        return func(*args, **kwargs)

    def _report_writes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self._on_write is not None
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for leaf in tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name)):
                    if isinstance(leaf, torch.Tensor):
                        self._on_write(leaf)

    def _fill(self, func: Any, tensor: torch.Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(tensor, DTensor):
            values = self._local_values(func, tensor, rest, kwargs)
            if func._schema.is_mutable:
                local_part(tensor).copy_(values)
                return tensor
            return like(tensor, values.contiguous())
        owner = self._shards.owner(tensor)
        if owner is None:
            return func(tensor, *rest, **kwargs)
        if tensor.numel() != local_part(owner.sharded).numel() or not tensor.is_contiguous():
            with self._stream(owner, tensor.device):
                return func(tensor, *rest, **kwargs)
        values = self._local_values(func, cast(DTensor, owner.sharded), rest, kwargs).reshape(tensor.shape)
        return tensor.copy_(values) if func._schema.is_mutable else values.contiguous()

    def _local_values(self, func: Any, tensor: DTensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Return this rank's shard of the result of ``func`` on the full tensor."""
        if any(placement.is_partial() for placement in tensor.placements):
            raise UnsupportedError(f"sharded_rng: {func._schema.name} was called on a tensor placed as a pending sum.")
        extent = self._extent(tensor)
        # The *_like operations need shape and dtype only: expand an element instead of allocating the full tensor.
        shape = tensor.shape if func._schema.is_mutable else ()
        full = torch.empty(shape, dtype=tensor.dtype, device=local_part(tensor).device).expand(tensor.shape)
        return extent.take(func(full, *rest, **kwargs))

    def _extent(self, tensor: DTensor) -> ShardExtent:
        return extent_of(tensor, self._shardings.get((tuple(tensor.shape), tensor.device_mesh, tensor.placements)))

    @contextmanager
    def _stream(self, owner: ShardedParameter, device: torch.device) -> Iterator[None]:
        """Use the random stream of the shards that cover the same block of their parameters as that of ``owner``."""
        extent, generator = self._extent(cast(DTensor, owner.sharded)), default_generator(device)
        outside, state = generator.get_state(), self._streams.get((extent, device))
        if state is None:
            generator.manual_seed(crc32(repr((self._seed, extent)).encode()))
        else:
            generator.set_state(state)
        try:
            yield
        finally:
            self._streams[extent, device] = generator.get_state()
            generator.set_state(outside)


class _Shards:
    """Finds the parameter of a plain tensor that is a view of a local shard, by its address."""

    def __init__(self, parameters: Sequence[ShardedParameter]) -> None:
        pairs = [(p, local_part(p.sharded)) for p in parameters]
        plain = [(p, local) for p, local in pairs if type(local) is torch.Tensor and not local.is_meta]
        self._by_address = sorted((pair for pair in plain if pair[1].numel()), key=lambda pair: pair[1].data_ptr())
        self._addresses = [local.data_ptr() for _, local in self._by_address]
        self._empty = [(p, local) for p, local in plain if not local.numel()]

    def owner(self, tensor: torch.Tensor) -> ShardedParameter | None:
        """Return the parameter, or ``None`` for a tensor that is not part of a shard."""
        if tensor.is_meta or type(tensor) not in (torch.Tensor, nn.Parameter):
            return None
        if not tensor.numel():
            return self._owner_of_empty(tensor)
        found = bisect_right(self._addresses, tensor.data_ptr()) - 1
        if found < 0:
            return None
        owner, local = self._by_address[found]
        length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        is_within = tensor.data_ptr() + length * tensor.itemsize <= local.data_ptr() + local.nbytes
        return owner if is_within and local.device == tensor.device else None

    def _owner_of_empty(self, tensor: torch.Tensor) -> ShardedParameter | None:
        """Return the parameter of an empty tensor, which has no address: match its storage, then its shape."""
        storage = tensor.untyped_storage()._cdata
        near = [(p, local) for p, local in self._empty if local.untyped_storage()._cdata == storage]
        found = [p for p, local in near if local.shape == tensor.shape] or [p for p, _ in near]
        if len({(p.sharding.shape, p.dtype) for p in found}) > 1:
            raise UnsupportedError(
                "sharded_rng: a random operation was called on an empty local tensor that may belong to any of "
                f"{[p.name for p in found]}. Call it on the parameter instead of on its local tensor."
            )
        return found[0] if found else None


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that random operations on ``device`` use."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    module.init()
    return cast(torch.Generator, module.default_generators[device.index])
