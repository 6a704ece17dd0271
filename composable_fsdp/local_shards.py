"""What an element-wise update needs of sharded parameters, as plain tensors; of many small ones, in one tensor.

Of what an update of a small shard costs, its elements are the least. They come out the same in whatever tensor they
are. So small shards to which an update would do the same are copied into one, their gradients and states into others,
and afterwards back to where they lie.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor

__all__ = ["Entry", "JoinedShards", "LocalShard", "alike", "as_state", "is_like", "is_small"]

Entry = dict[str, Any]
"""State of one parameter."""

SMALL_NUMEL = 1 << 10
"""Elements of a shard up to which the copies cost less than an update by itself: ``benchmarks/optimizer_step.py``."""

JOINED_NUMEL = 1 << 14
"""Elements that are updated at once: the copies of them stay in the cache, and take no fresh memory from the system."""


_WIDE = (torch.float32, torch.float64)


class LocalShard(NamedTuple):
    """One sharded parameter, in the memory of its DTensors.

    Args:
        parameter: the DTensor.
        values: its local tensor, with one dim if that has none: so its state differs in shape from a count of steps.
        gradient: likewise.
        entry: its state; what is sharded like it, likewise.
    """

    parameter: Any
    values: torch.Tensor
    gradient: torch.Tensor
    entry: Entry


def is_like(value: Any, tensor: torch.Tensor) -> bool:
    """Whether ``value`` is state of the elements of ``tensor``, not of the whole."""
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape


def as_state(value: Any, shard: LocalShard) -> Any:
    """A tensor of the shard's shape as a DTensor like the parameter, in the same memory; anything else as it is."""
    if not is_like(value, shard.values):
        return value
    parameter = shard.parameter
    return DTensor.from_local(
        value.detach().view(parameter._local_tensor.shape),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def is_small(shard: LocalShard) -> bool:
    """Whether ``shard`` is worth joining with others, and its elements come out the same then.

    Those of 16 bits do not: at the end of a tensor, where they do not fill a vector of the processor, they are rounded
    differently. On accelerators optimizers update many tensors at once by themselves.
    """
    values, gradient = shard.values, shard.gradient
    if values.numel() > SMALL_NUMEL or not values.is_cpu or values.dtype not in _WIDE:
        return False
    return gradient.dtype is values.dtype and type(values) is type(gradient) is torch.Tensor


def alike(shards: Iterable[LocalShard]) -> list[list[LocalShard]]:
    """``shards`` by what an update does to them, as many together as are updated at once."""
    runs: dict[Hashable, list[list[LocalShard]]] = {}
    filled: dict[Hashable, int] = {}
    for shard in shards:
        common, numel = _common(shard), shard.values.numel()
        run, total = runs.setdefault(common, []), filled.get(common, 0) + numel
        if not run or total > JOINED_NUMEL:
            run.append([])
            total = numel
        run[-1].append(shard)
        filled[common] = total
    return [together for run in runs.values() for together in run]


def _common(shard: LocalShard) -> Hashable:
    """What is the same of all that can be joined: dtypes, and all state that is not of the elements."""
    common: list[Hashable] = [shard.values.dtype]
    for name, value in shard.entry.items():
        if not isinstance(value, torch.Tensor):
            common += (name, value)
        elif value.shape == shard.values.shape:
            common += (name, value.dtype)
        else:
            common += (name, value.dtype, value.item() if value.ndim == 0 else id(value))
    return tuple(common)


class JoinedShards:
    """Several small shards that are alike, and the tensor that stands in for them. Final.

    Attributes:
        pieces: that tensor, which has all their elements and a gradient.
        given: its state before the update.
    """

    def __init__(self, shards: Sequence[LocalShard]) -> None:
        self._shards = shards
        self._values = [shard.values for shard in shards]
        with torch.no_grad():
            self._joined = _flatten_dense_tensors(self._values)
            self._joined.grad = _flatten_dense_tensors([shard.gradient for shard in shards])
            self._entry: Entry = {name: self._state(name) for name in shards[0].entry}
        self.pieces = (self._joined,)
        self.given = (self._entry,)

    def _state(self, name: str) -> Any:
        first = self._shards[0]
        if is_like(first.entry[name], first.values):
            return _flatten_dense_tensors([shard.entry[name] for shard in self._shards])
        return _copy_of(first.entry[name])

    @property
    def parameters(self) -> list[Any]:
        """The sharded parameters."""
        return [shard.parameter for shard in self._shards]

    @torch.no_grad()
    def take_back(self, new: Sequence[Mapping[str, Any]], state: MutableMapping[Any, Entry]) -> None:
        """Takes values and their state to where they belong, as far as an update came.

        Args:
            new: state of ``pieces`` after the update, if they have any.
            state: of the optimizer, by parameter.
        """
        entry = new[0] if new else self._entry
        self._copy_back(self._joined, self._values)
        for name, value in entry.items():
            if name not in self._entry or not isinstance(value, torch.Tensor):
                self._set(name, value, state)
                continue
            places = [shard.entry[name] for shard in self._shards]
            if is_like(value, self._joined):
                self._copy_back(value, places)
            else:
                torch._foreach_copy_(places, [value] * len(places))
        for name in self._entry.keys() - entry.keys():
            for shard in self._shards:
                del state[shard.parameter][name]

    def _copy_back(self, joined: torch.Tensor, places: list[torch.Tensor]) -> None:
        torch._foreach_copy_(places, _unflatten_dense_tensors(joined, places))

    def _set(self, name: str, value: Any, state: MutableMapping[Any, Entry]) -> None:
        """State that was not there, or is no tensor: each shard gets its own."""
        each: Sequence[Any] = [value] * len(self._shards)
        if is_like(value, self._joined):
            each = _unflatten_dense_tensors(value, self._values)
        for shard, own in zip(self._shards, each, strict=True):
            state[shard.parameter][name] = as_state(_copy_of(own), shard)


def _copy_of(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
