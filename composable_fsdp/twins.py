"""Plain tensors that stand in for sharded parameters while an optimizer updates them.

An element-wise update of a shard needs nothing but that shard, its gradient and its state, yet every operation on a
DTensor is dispatched in Python. So for the duration of the update each sharded parameter is stood in for by its *twin*:
a plain tensor of the same memory, or several that are pieces of it. Small ones share a twin (``local_shards``).

Invariant: outside of the update an optimizer holds sharded parameters only, and state of their shape as DTensors.
Nothing is kept from one step to the next, so that whatever replaces shards, gradients or state in between is followed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from operator import is_, methodcaller
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable_fsdp.local_shards import Entry, JoinedShards, LocalShard, alike, as_state, is_like, is_small

__all__ = ["twins_of"]

PIECE_NUMEL = 1 << 18
"""Elements of a piece on a CPU: the dozen operations of an update then find parameter, gradient and state in its cache,
the results in between need no fresh memory from the system, and what Python does for each piece is still little.
"""


class _Twin(NamedTuple):
    """Of one shard."""

    shard: LocalShard
    pieces: Sequence[torch.Tensor]
    given: Sequence[Entry]
    """State of each piece before the update."""

    @property
    def parameters(self) -> list[Any]:
        return [self.shard.parameter]

    def take_back(self, new: Sequence[Entry], state: MutableMapping[Any, Entry]) -> None:
        """Brings the parameter's state up to ``new``, that of the pieces. Their values are where they belong."""
        if new:
            _take_over(_joined(self, new), self.shard, state[self.shard.parameter])


@contextmanager
def twins_of(optimizer: Optimizer, *, cuts: bool) -> Iterator[None]:
    """Twins for the sharded parameters that have a gradient, with local state; state that is new becomes DTensors.

    Args:
        optimizer: whose update runs inside.
        cuts: shards may be updated piece by piece, and small ones as pieces of one tensor: in their state, tensors of
            their shape are made of elements like them, and all else is of the whole parameter and comes out the same
            for every piece.
    """
    groups, state = optimizer.param_groups, optimizer.state
    parameters = [group["params"] for group in groups]
    twins: list[_Twin | JoinedShards] = []
    try:
        for group in groups:
            stand_ins: list[torch.Tensor] = []
            shards: list[LocalShard] = []
            for parameter in group["params"]:
                if _is_sharded(parameter):
                    shards.append(_shard(parameter, state.get(parameter, {})))
                else:
                    stand_ins.append(parameter)
            for twin in _twins(shards, group) if cuts else map(_whole, shards):
                twins.append(twin)
                stand_ins += twin.pieces
                if twin.given[0]:
                    state.update(zip(twin.pieces, map(dict, twin.given), strict=True))
            group["params"] = stand_ins
        yield
    finally:  # also of an update that failed halfway: what it has done by then is done
        for group, params in zip(groups, parameters, strict=True):
            group["params"] = params
        for twin in twins:
            twin.take_back([entry for piece in twin.pieces if (entry := state.pop(piece, None)) is not None], state)
        # The memory knows that it has changed; this tells whoever looks at the DTensors.
        increment_version([parameter for twin in twins for parameter in twin.parameters])


def _twins(shards: Sequence[LocalShard], group: Mapping[str, Any]) -> Iterator[_Twin | JoinedShards]:
    """Of the shards of one group, the small ones joined and the large ones cut, where either is worth it."""
    small: list[LocalShard] = []
    for shard in shards:
        if not group.get("fused") and is_small(shard):
            small.append(shard)
        elif group.get("fused") or group.get("foreach"):
            yield _whole(shard)
        else:
            yield _cut(shard)
    for together in alike(small):
        yield JoinedShards(together) if len(together) > 1 else _whole(together[0])


_IS_PARTIAL = methodcaller("is_partial")


def _is_sharded(parameter: torch.Tensor) -> bool:
    """Whether shards are all that its update needs. What is added to pending sums would count once per rank."""
    if not isinstance(parameter, DTensor) or not isinstance(parameter.grad, DTensor):
        return False
    return not any(map(_IS_PARTIAL, parameter._spec.placements))


def _shard(parameter: Any, state: Mapping[str, Any]) -> LocalShard:
    gradient = parameter.grad
    if gradient._spec is not parameter._spec and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    entry = {name: _local(value) if isinstance(value, DTensor) else value for name, value in state.items()}
    return LocalShard(parameter, _local(parameter), _local(gradient), entry)


def _whole(shard: LocalShard) -> _Twin:
    """A plain tensor in the memory of the shard, with its gradient."""
    twin = shard.values.detach()
    _give(twin, shard.gradient)
    return _Twin(shard, (twin,), (shard.entry,))


def _cut(shard: LocalShard) -> _Twin:
    """Several, where the shard is large."""
    if shard.values.numel() > PIECE_NUMEL and shard.entry and _lie_alike(shard):
        return _Twin(shard, *_pieces(shard))
    return _whole(shard)


def _lie_alike(shard: LocalShard) -> bool:
    """Whether elements that belong to each other are in the same place of contiguous memory of the host.

    Not of 16-bit floats with several threads: those round differently at the ends of what each thread has.
    """
    values = shard.values
    if values.dtype.itemsize < torch.float32.itemsize and torch.get_num_threads() > 1:
        return False
    of_elements = [value for value in shard.entry.values() if is_like(value, values)]
    return values.is_cpu and all(tensor.is_contiguous() for tensor in (values, shard.gradient, *of_elements))


def _pieces(shard: LocalShard) -> tuple[Sequence[torch.Tensor], Sequence[Entry]]:
    """Pieces of a shard with their gradients, and the state of each. Of what they share, all but one have copies."""
    whole = shard.values.detach()
    pieces = whole.view(-1).split(PIECE_NUMEL)
    for piece, its_gradient in zip(pieces, shard.gradient.view(-1).split(PIECE_NUMEL), strict=True):
        _give(piece, its_gradient)
    given: list[Entry] = [{} for _ in pieces]
    for name, value in shard.entry.items():
        if is_like(value, whole):
            parts: Sequence[Any] = value.view(-1).split(PIECE_NUMEL)
        else:
            parts = [value, *(copy.deepcopy(value) for _ in pieces[1:])]
        for each, part in zip(given, parts, strict=True):
            each[name] = part
    return pieces, given


def _give(twin: torch.Tensor, gradient: torch.Tensor) -> None:
    if gradient.dtype != twin.dtype:
        twin.grad_dtype = gradient.dtype
    twin.grad = gradient


def _joined(twin: _Twin, new: Sequence[Entry]) -> Entry:
    """The state of the whole parameter, where the pieces came out of the update with ``new``."""
    if len(twin.pieces) == 1:
        return new[0]
    given, joined = twin.given[0], {}
    for name, value in new[0].items():
        if name in given and value is given[name]:
            joined[name] = twin.shard.entry[name]
        elif is_like(value, twin.pieces[0]):
            joined[name] = torch.cat([each[name] for each in new]).view(twin.shard.values.shape)
        else:
            joined[name] = value
    return joined


def _local(tensor: Any) -> torch.Tensor:
    """The local tensor, with one dim if it has none: so its state differs in shape from a count of steps."""
    local: torch.Tensor = tensor._local_tensor
    return local if local.ndim else local.view(1)


def _take_over(new: Entry, shard: LocalShard, state: Entry) -> None:
    """Brings ``state`` of a parameter up to ``new``. Most of it was changed in place."""
    given = shard.entry
    if new.keys() == given.keys() and all(map(is_, new.values(), given.values())):
        return
    for name, value in new.items():
        if name not in given or value is not given[name]:
            state[name] = as_state(value, shard)
    for name in [name for name in given if name not in new]:
        del state[name]
