"""``sharded_rng``: random operations on shards that give each rank its shard of the unsharded tensor's values.

On CPU, torch's own ``DTensor`` draws a shard from the rank's generator, so that ranks with one seed draw equal shards.
On accelerators each shard starts at another offset: shards differ, but depend on the number of shards.

Invariant: an operation on a full tensor advances the generator as it does without sharding, on every rank. So the
generators of all ranks stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from composable_fsdp._core.memory import default_generator
from composable_fsdp._core.params import local_part
from composable_fsdp._core.state import FSDPState, states_below
from composable_fsdp._extents import extent_of, like
from composable_fsdp.errors import UnsupportedError

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
    ``randn_like``, ``randint_like``), and ``torch.nn.init``, which uses them. Their argument is any ``DTensor``. Each
    rank draws the values of the full tensor, which takes its memory, and keeps its shard. The values are those of the
    same calls on the unsharded model after ``torch.manual_seed(seed)``, on any mesh. Every rank must make the same
    calls, replicas too. Nothing is communicated, unless a number is read from a sharded tensor, as
    ``nn.init.trunc_normal_`` does: it is then read from the full tensor, on every rank.

    Plain tensors get the same values on all ranks. The generators of the CPU and of the mesh's device are seeded, and
    restored at the end. Those of Python and NumPy are unchanged.

    Args:
        model: a module that contains sharded ones. Otherwise the generators are seeded and restored only.
        seed: the same on every rank.

    Raises:
        UnsupportedError: another random operation ran on a sharded tensor, such as dropout; or one ran on the local
            tensor of a sharded parameter, which would give all ranks' shards the same values.
    """
    states = states_below(model)
    with seeded(states, seed), ShardedRandom(states):
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
        on_write: called with every tensor that any operation writes to.
    """

    def __init__(self, states: Sequence[FSDPState], on_write: Callable[[torch.Tensor], object] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_write = on_write
        parameters = [parameter for state in states for parameter in state.group.parameters]
        self._shardings = {(p.sharding.shape, p.sharding.mesh, p.sharding.placements): p.sharding for p in parameters}
        # A rank that happens to hold all elements must raise like the others.
        cut = [p for p in parameters if p.sharding.axes.shard.size > 1 or p.sharding.inner is not None]
        self._shards = {_storage(local_part(p.sharded)) for p in cut} - {0}

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
        if name in IN_PLACE | LIKE and isinstance(first, DTensor) and len(tensors) == 1:
            return self._fill(func, first, args[1:], kwargs)
        if any(_storage(tensor) in self._shards for tensor in tensors if not isinstance(tensor, DTensor)):
            raise UnsupportedError(
                f"sharded_rng: {name} was called on the local tensor of a sharded parameter, or a part of it. Call "
                "it on the parameter itself, and each rank gets its shard of the values."
            )
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

    def _fill(self, func: Any, tensor: DTensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Give ``tensor``, or a new one like it, this rank's shard of the result of ``func`` on the full tensor."""
        if any(placement.is_partial() for placement in tensor.placements):
            raise UnsupportedError(f"sharded_rng: {func._schema.name} was called on a tensor placed as a pending sum.")
        extent = extent_of(tensor, self._shardings.get((tuple(tensor.shape), tensor.device_mesh, tensor.placements)))
        # The *_like operations need shape and dtype only: expand an element instead of allocating the full tensor.
        shape = tensor.shape if func._schema.is_mutable else ()
        full = torch.empty(shape, dtype=tensor.dtype, device=local_part(tensor).device).expand(tensor.shape)
        values = extent.take(func(full, *rest, **kwargs))
        if func._schema.is_mutable:
            local_part(tensor).copy_(values)
            return tensor
        return like(tensor, values.contiguous())


def _storage(tensor: torch.Tensor) -> int:
    """Return the identity of the memory of a plain tensor; 0 for a subclass that has none of its own."""
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta
    return int(cast(Any, tensor.untyped_storage())._cdata) if is_plain else 0
