"""Plain tensors that replace sharded parameters while an optimizer updates them.

An element-wise update of a shard needs only that shard, its gradient and its state, but every operation on a DTensor is
dispatched in Python. So during the update each sharded parameter is replaced by its *local copy*: a plain tensor that
shares the memory of the local shard.

Invariant: outside of the update an optimizer holds sharded parameters only, and state of their shape as DTensors.
Nothing is kept between steps, so shards, gradients and state may be replaced in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import is_, methodcaller
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable_fsdp._extents import like

Entry = dict[str, Any]
"""The optimizer state of one parameter."""


class _LocalCopy(NamedTuple):
    parameter: Any
    shard: torch.Tensor
    entry: Entry
    """The local state before the update."""


@contextmanager
def local_copies_of(optimizer: Optimizer) -> Iterator[None]:
    """Replace sharded parameters with gradients by local copies, with local state; new state becomes DTensors."""
    groups, state = optimizer.param_groups, optimizer.state
    parameters = [group["params"] for group in groups]
    copies: list[_LocalCopy] = []
    try:
        for group in groups:
            replacements: list[torch.Tensor] = []
            for parameter in group["params"]:
                if _is_sharded(parameter):
                    copied = _local_copy(parameter, state.get(parameter, {}))
                    copies.append(copied)
                    replacements.append(copied.shard)
                    if copied.entry:
                        state[copied.shard] = dict(copied.entry)
                else:
                    replacements.append(parameter)
            group["params"] = replacements
        yield
    finally:  # also after an update that failed halfway: the finished part counts
        for group, params in zip(groups, parameters, strict=True):
            group["params"] = params
        for copied in copies:
            new = state.pop(copied.shard, None)
            if new is not None:
                _update_state(new, copied.entry, state[copied.parameter], copied.parameter)
        # Autograd's version counter of the DTensors does not see writes to the local copies.
        increment_version([copied.parameter for copied in copies])


_IS_PARTIAL = methodcaller("is_partial")


def _is_sharded(parameter: torch.Tensor) -> bool:
    """Return whether the update of ``parameter`` needs shards only. On partial sums it would count once per rank."""
    if not isinstance(parameter, DTensor) or not isinstance(parameter.grad, DTensor):
        return False
    return not any(map(_IS_PARTIAL, parameter._spec.placements))


def _local_copy(parameter: Any, state: Mapping[str, Any]) -> _LocalCopy:
    """Return a plain tensor in the memory of the local shard of ``parameter``, with its gradient."""
    shard, gradient = _local(parameter).detach(), gradient_of(parameter)
    entry = {name: _local(value) if isinstance(value, DTensor) else value for name, value in state.items()}
    if gradient.dtype != shard.dtype:
        shard.grad_dtype = gradient.dtype
    shard.grad = _local(gradient)
    return _LocalCopy(parameter, shard, entry)


def gradient_of(parameter: Any) -> Any:
    """Return the gradient, of a DTensor one with the placements of ``parameter``. None if there is none."""
    gradient = parameter.grad
    if gradient is None or not isinstance(parameter, DTensor) or gradient._spec is parameter._spec:
        return gradient
    is_alike = gradient.placements == parameter.placements
    return gradient if is_alike else gradient.redistribute(placements=parameter.placements)


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
    if not isinstance(value, torch.Tensor) or value.shape != _local(parameter).shape:
        return value
    return like(parameter, value.detach().view(parameter._local_tensor.shape))
