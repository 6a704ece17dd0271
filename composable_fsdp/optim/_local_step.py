"""Plain tensors that replace sharded parameters while an optimizer updates them.

An element-wise update of a shard needs only that shard, its gradient and its state, but every operation on a DTensor is
dispatched in Python. So during the update each sharded parameter is replaced by its *local copy*: a plain tensor that
shares the memory of the local shard, or several that are pieces of it.

Invariant: outside of the update an optimizer holds sharded parameters only, and state of their shape as DTensors.
Nothing is kept between steps, so shards, gradients and state may be replaced in between.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_, methodcaller
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable_fsdp._api.extents import like
from composable_fsdp._core.memory import is_host

__all__ = ["local_copies_of"]

Entry = dict[str, Any]
"""The optimizer state of one parameter."""

PIECE_NUMEL = 1 << 18
"""The number of elements of a piece on a CPU.

Parameter, gradient and state of a piece fit in the cache for the dozen operations of an update, temporaries need no
fresh memory from the system, and the Python overhead per piece is small.
"""


class _LocalCopy(NamedTuple):
    parameter: Any
    pieces: Sequence[torch.Tensor]
    before: Sequence[Entry]
    """The state of each piece before the update."""
    entry: Entry
    """The local state of the unsplit shard."""


@contextmanager
def local_copies_of(optimizer: Optimizer, *, allow_split: bool) -> Iterator[None]:
    """Replace sharded parameters with gradients by local copies, with local state; new state becomes DTensors.

    Args:
        optimizer: the optimizer whose update runs inside.
        allow_split: shards may be updated in pieces. Then state tensors of the shard's shape must be element-wise, and
            all other state must be the same for every piece.
    """
    groups, state = optimizer.param_groups, optimizer.state
    parameters = [group["params"] for group in groups]
    copies: list[_LocalCopy] = []
    try:
        for group in groups:
            splits = allow_split and not group.get("foreach") and not group.get("fused")
            replacements: list[torch.Tensor] = []
            for parameter in group["params"]:
                if _is_sharded(parameter):
                    copied = _local_copy(parameter, state.get(parameter, {}), allow_split=splits)
                    copies.append(copied)
                    replacements += copied.pieces
                    if copied.entry:
                        state.update(zip(copied.pieces, map(dict, copied.before), strict=True))
                else:
                    replacements.append(parameter)
            group["params"] = replacements
        yield
    finally:  # also after an update that failed halfway: the finished part counts
        for group, params in zip(groups, parameters, strict=True):
            group["params"] = params
        for copied in copies:
            new = [entry for piece in copied.pieces if (entry := state.pop(piece, None)) is not None]
            if new:
                _update_state(_merge_pieces(copied, new), copied.entry, state[copied.parameter], copied.parameter)
        # Autograd's version counter of the DTensors does not see writes to the local copies.
        increment_version([copied.parameter for copied in copies])


_IS_PARTIAL = methodcaller("is_partial")


def _is_sharded(parameter: torch.Tensor) -> bool:
    """Return whether the update of ``parameter`` needs shards only. On partial sums it would count once per rank."""
    if not isinstance(parameter, DTensor) or not isinstance(parameter.grad, DTensor):
        return False
    return not any(map(_IS_PARTIAL, parameter._spec.placements))


def _local_copy(parameter: Any, state: Mapping[str, Any], *, allow_split: bool) -> _LocalCopy:
    """Return plain tensors in the memory of the local shard of ``parameter``, with its gradient."""
    shard, gradient = _local(parameter).detach(), parameter.grad
    if gradient._spec is not parameter._spec and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    entry = dict(state)
    for name, value in state.items():
        if isinstance(value, DTensor):
            entry[name] = _local(value)
    local_gradient = _local(gradient)
    if allow_split and shard.numel() > PIECE_NUMEL and entry and _can_split(shard, local_gradient, entry):
        return _LocalCopy(parameter, *_pieces(shard, local_gradient, entry), entry)
    _set_gradient(shard, local_gradient)
    return _LocalCopy(parameter, (shard,), (entry,), entry)


def _can_split(shard: torch.Tensor, gradient: torch.Tensor, entry: Entry) -> bool:
    """Return whether shard, gradient and element-wise state are contiguous host memory, so that pieces correspond.

    With several threads, 16-bit floats are excluded: they round differently at the boundaries between threads.
    """
    if shard.dtype.itemsize < torch.float32.itemsize and torch.get_num_threads() > 1:
        return False
    elementwise = [value for value in entry.values() if _is_like(value, shard)]
    return is_host(shard.device) and all(tensor.is_contiguous() for tensor in (shard, gradient, *elementwise))


def _pieces(
    shard: torch.Tensor, gradient: torch.Tensor, entry: Entry
) -> tuple[Sequence[torch.Tensor], Sequence[Entry]]:
    """Return the pieces of ``shard`` with their gradients, and the state of each. All but one copy the other state."""
    pieces = shard.view(-1).split(PIECE_NUMEL)
    for piece, its_gradient in zip(pieces, gradient.view(-1).split(PIECE_NUMEL), strict=True):
        _set_gradient(piece, its_gradient)
    before: list[Entry] = [{} for _ in pieces]
    for name, value in entry.items():
        if _is_like(value, shard):
            parts: Sequence[Any] = value.view(-1).split(PIECE_NUMEL)
        else:
            parts = [value, *(copy.deepcopy(value) for _ in pieces[1:])]
        for each, part in zip(before, parts, strict=True):
            each[name] = part
    return pieces, before


def _set_gradient(copied: torch.Tensor, gradient: torch.Tensor) -> None:
    if gradient.dtype != copied.dtype:
        copied.grad_dtype = gradient.dtype
    copied.grad = gradient


def _merge_pieces(copied: _LocalCopy, new: Sequence[Entry]) -> Entry:
    """Return the state of the unsplit shard, given the state ``new`` of its pieces after the update."""
    if len(copied.pieces) == 1:
        return new[0]
    before, joined = copied.before[0], {}
    for name, value in new[0].items():
        if name in before and value is before[name]:
            joined[name] = copied.entry[name]
        elif _is_like(value, copied.pieces[0]):
            joined[name] = torch.cat([each[name] for each in new]).view(_local(copied.parameter).shape)
        else:
            joined[name] = value
    return joined


def _is_like(value: Any, tensor: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape


def _local(tensor: Any) -> torch.Tensor:
    """Return the local tensor, with at least one dim, so that its state differs in shape from a step count."""
    local: torch.Tensor = tensor._local_tensor
    return local if local.ndim else local.view(1)


def _update_state(new: Entry, before: Entry, state: Entry, parameter: Any) -> None:
    """Update ``state`` of ``parameter`` from ``before`` to ``new``. Most of it was changed in place."""
    if new.keys() == before.keys() and all(map(is_, new.values(), before.values())):
        return
    for name, value in new.items():
        if name not in before or value is not before[name]:
            state[name] = _as_state(value, parameter)
    for name in [name for name in before if name not in new]:
        del state[name]


def _as_state(value: Any, parameter: Any) -> Any:
    """Return a tensor of the shard's shape as a DTensor that shares its memory; return any other value unchanged."""
    if not _is_like(value, _local(parameter)):
        return value
    return like(parameter, value.detach().view(parameter._local_tensor.shape))
