"""Plain tensors that stand in for sharded parameters while an optimizer updates them.

An element-wise update of a shard needs nothing but that shard, its gradient and its state, yet every operation on a
DTensor is dispatched in Python. So for the duration of the update each sharded parameter is stood in for by its *twin*:
a plain tensor of the same memory, or several that are pieces of it.

Invariant: outside of the update an optimizer holds sharded parameters only, and state of their shape as DTensors.
Nothing is kept from one step to the next, so that whatever replaces shards, gradients or state in between is followed.
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

__all__ = ["local_copies_of"]

Entry = dict[str, Any]
"""State of one parameter."""

PIECE_NUMEL = 1 << 18
"""Elements of a piece on a CPU: the dozen operations of an update then find parameter, gradient and state in its cache,
the results in between need no fresh memory from the system, and what Python does for each piece is still little.
"""


class _LocalCopy(NamedTuple):
    parameter: Any
    pieces: Sequence[torch.Tensor]
    given: Sequence[Entry]
    """State of each piece before the update."""
    entry: Entry
    """That of the whole, local."""


@contextmanager
def local_copies_of(optimizer: Optimizer, *, cuts: bool) -> Iterator[None]:
    """Twins for the sharded parameters that have a gradient, with local state; state that is new becomes DTensors.

    Args:
        optimizer: whose update runs inside.
        cuts: shards may be updated piece by piece: in their state, tensors of their shape are made of elements like
            them, and all else is of the whole parameter and comes out the same for every piece.
    """
    groups, state = optimizer.param_groups, optimizer.state
    parameters = [group["params"] for group in groups]
    twins: list[_LocalCopy] = []
    try:
        for group in groups:
            cuts_here = cuts and not group.get("foreach") and not group.get("fused")
            stand_ins: list[torch.Tensor] = []
            for parameter in group["params"]:
                if _is_sharded(parameter):
                    twin = _twin(parameter, state.get(parameter, {}), cuts=cuts_here)
                    twins.append(twin)
                    stand_ins += twin.pieces
                    if twin.entry:
                        state.update(zip(twin.pieces, map(dict, twin.given), strict=True))
                else:
                    stand_ins.append(parameter)
            group["params"] = stand_ins
        yield
    finally:  # also of an update that failed halfway: what it has done by then is done
        for group, params in zip(groups, parameters, strict=True):
            group["params"] = params
        for twin in twins:
            new = [entry for piece in twin.pieces if (entry := state.pop(piece, None)) is not None]
            if new:
                _take_over(_joined(twin, new), twin.entry, state[twin.parameter], twin.parameter)
        # The memory knows that it has changed; this tells whoever looks at the DTensors.
        increment_version([twin.parameter for twin in twins])


_IS_PARTIAL = methodcaller("is_partial")


def _is_sharded(parameter: torch.Tensor) -> bool:
    """Whether shards are all that its update needs. What is added to pending sums would count once per rank."""
    if not isinstance(parameter, DTensor) or not isinstance(parameter.grad, DTensor):
        return False
    return not any(map(_IS_PARTIAL, parameter._spec.placements))


def _twin(parameter: Any, state: Mapping[str, Any], *, cuts: bool) -> _LocalCopy:
    """Plain tensors in the memory of the local shard, with its gradient."""
    whole, gradient = _local(parameter).detach(), parameter.grad
    if gradient._spec is not parameter._spec and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    entry = dict(state)
    for name, value in state.items():
        if isinstance(value, DTensor):
            entry[name] = _local(value)
    local_gradient = _local(gradient)
    if cuts and whole.numel() > PIECE_NUMEL and entry and _lie_alike(whole, local_gradient, entry):
        return _LocalCopy(parameter, *_pieces(whole, local_gradient, entry), entry)
    _give(whole, local_gradient)
    return _LocalCopy(parameter, (whole,), (entry,), entry)


def _lie_alike(whole: torch.Tensor, gradient: torch.Tensor, entry: Entry) -> bool:
    """Whether elements that belong to each other are in the same place of contiguous memory of the host.

    Not of 16-bit floats with several threads: those round differently at the ends of what each thread has.
    """
    if whole.dtype.itemsize < torch.float32.itemsize and torch.get_num_threads() > 1:
        return False
    of_elements = [value for value in entry.values() if _is_like(value, whole)]
    return whole.device.type == "cpu" and all(tensor.is_contiguous() for tensor in (whole, gradient, *of_elements))


def _pieces(
    whole: torch.Tensor, gradient: torch.Tensor, entry: Entry
) -> tuple[Sequence[torch.Tensor], Sequence[Entry]]:
    """Pieces of ``whole`` with their gradients, and the state of each. Of what they share, all but one have copies."""
    pieces = whole.view(-1).split(PIECE_NUMEL)
    for piece, its_gradient in zip(pieces, gradient.view(-1).split(PIECE_NUMEL), strict=True):
        _give(piece, its_gradient)
    given: list[Entry] = [{} for _ in pieces]
    for name, value in entry.items():
        if _is_like(value, whole):
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


def _joined(twin: _LocalCopy, new: Sequence[Entry]) -> Entry:
    """The state of the whole parameter, where the pieces came out of the update with ``new``."""
    if len(twin.pieces) == 1:
        return new[0]
    given, joined = twin.given[0], {}
    for name, value in new[0].items():
        if name in given and value is given[name]:
            joined[name] = twin.entry[name]
        elif _is_like(value, twin.pieces[0]):
            joined[name] = torch.cat([each[name] for each in new]).view(_local(twin.parameter).shape)
        else:
            joined[name] = value
    return joined


def _is_like(value: Any, tensor: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape


def _local(tensor: Any) -> torch.Tensor:
    """The local tensor, with one dim if it has none: so its state differs in shape from a count of steps."""
    local: torch.Tensor = tensor._local_tensor
    return local if local.ndim else local.view(1)


def _take_over(new: Entry, given: Entry, state: Entry, parameter: Any) -> None:
    """Brings ``state`` of ``parameter`` up to ``new``, which was ``given`` before. Most of it was changed in place."""
    if new.keys() == given.keys() and all(map(is_, new.values(), given.values())):
        return
    for name, value in new.items():
        if name not in given or value is not given[name]:
            state[name] = _as_state(value, parameter)
    for name in [name for name in given if name not in new]:
        del state[name]


def _as_state(value: Any, parameter: Any) -> Any:
    """A tensor of the shard's shape as a DTensor like ``parameter``, in the same memory; anything else as it is."""
    if not _is_like(value, _local(parameter)):
        return value
    return DTensor.from_local(
        value.detach().view(parameter._local_tensor.shape),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
