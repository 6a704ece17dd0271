"""The contents of a checkpoint and their keys.

========================================  =============================================================
``model.<name>``                          parameters, buffers, extra states of modules
``optimizer.state.<name>.<key>``          optimizer state of the parameter of that name
``optimizer.param_groups``                list of dicts, with parameter names in ``params``
``averages.values.<name>``                moving averages; ``averages.steps`` is the number of updates
``communication.<name>.residual``         state of codecs with error feedback; ``.rounds`` beside it
``ranks.<rank>.extra``, ``….random``      the ``extra`` of each rank; its random number generators
``classes.<key>``                         ``Record`` (``inner_tensors.py``) of a tensor subclass that is saved as inner
                                          tensors under ``<key>.<inner>``
========================================  =============================================================

Names are those of the model without wrappers such as ``torch.compile``.
"""

from __future__ import annotations

import io
import pickle
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable_fsdp._api.communication_state import CommunicationState
from composable_fsdp._core.extents import states_below
from composable_fsdp._core.memory import current_accelerator
from composable_fsdp._core.params import alias_of, local_part
from composable_fsdp.checkpoint._state_dict import inner_tensors
from composable_fsdp.checkpoint._state_dict.ema import ShardedEMA
from composable_fsdp.checkpoint._state_dict.optimizer import OptimizerParams, has_shards_shape, is_plain, merge_flags
from composable_fsdp.checkpoint._state_dict.tensors import LocalShard, checksum, tensors_of
from composable_fsdp.errors import CheckpointError

__all__ = [
    "Contents",
    "Contribution",
    "Merged",
    "Path",
    "check_replicated",
    "communication_of",
    "contents_of",
    "get_random_state",
    "key_of",
    "merge",
    "serialize",
    "set_random_state",
]

Path = tuple[str, ...]
"""The path of a value in a nested state dict. Joined by dots, it is the key in the checkpoint."""


_PICKLE_ERRORS = (pickle.PicklingError, AttributeError, TypeError)
"""What pickle raises for objects that it cannot write, depending on their class."""


@dataclass
class Contents:
    """The state that one rank has to save, by path. It is complete after :meth:`settle`.

    Attributes:
        parts: local shards of tensors. A block that several ranks hold is written by one of them.
        objects: all other values, serialized by ``torch.save``. If several ranks have a key, one of them writes it.
        aliases: further paths of tensors in ``parts``, with the path there.
        replicated: checksums of the plain tensors in ``parts`` that must be equal on all ranks, by key.
        groups: serialized param groups of the optimizer by the names of their parameters, with these in ``params``.
        may_be_shards: whether plain optimizer state has the shape of a local shard. One rank alone cannot tell whether
            such a tensor is its shard or a copy that every rank has.
    """

    parts: dict[Path, LocalShard] = field(default_factory=dict)
    objects: dict[Path, bytes] = field(default_factory=dict)
    aliases: dict[Path, Path] = field(default_factory=dict)
    replicated: dict[str, int] = field(default_factory=dict)
    groups: dict[tuple[str, ...], bytes] = field(default_factory=dict)
    may_be_shards: dict[Path, bool] = field(default_factory=dict)

    def contribution(self) -> Contribution:
        """Return what the other ranks must know of this rank's contents."""
        parts = {key_of(path): part for path, part in self.parts.items()}
        for key, part in parts.items():
            inner_tensors.refuse_unknown(key, part)
        inner = {k: inner_tensors.inner_contribution_of(p) for k, p in parts.items() if inner_tensors.has_inner(p)}
        return Contribution(self.groups, self.may_be_shards, inner)

    def settle(self, merged: Merged) -> None:
        """Complete the contents by what all ranks have."""
        for path in self.may_be_shards:
            if not merged.are_shards[path]:
                part = self.parts[path] = LocalShard(local_part(self.parts[path].value))
                if not inner_tensors.has_inner(part):
                    self.replicated[key_of(path)] = checksum(part.local)
        if merged.groups:
            groups = [torch.load(io.BytesIO(d), map_location="cpu", weights_only=False) for d in merged.groups.values()]
            self.objects["optimizer", "param_groups"] = serialize(groups)
        self._expand(merged.records)

    def _expand(self, merged: Mapping[str, inner_tensors.Record]) -> None:
        """Replace each tensor in ``merged`` by its inner tensors and its record."""
        for path in [path for path in self.parts if key_of(path) in merged]:
            part, record = self.parts.pop(path), merged[key_of(path)]
            aliases = [alias for alias, of in self.aliases.items() if of == path]
            for each in (path, *aliases):
                self.aliases.pop(each, None)
                self.objects["classes", key_of(each)] = serialize(replace(record, path=each).encoded())
            for suffix, inner in inner_tensors.parts_of(part, record).items():
                self.parts[_with_suffix(path, suffix)] = inner
                self.aliases |= {_with_suffix(alias, suffix): _with_suffix(path, suffix) for alias in aliases}


def key_of(path: Path) -> str:
    return ".".join(path)


def serialize(value: object) -> bytes:
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def _with_suffix(path: Path, suffix: str) -> Path:
    return (*path[:-1], f"{path[-1]}{suffix}")


def contents_of(
    model: nn.Module,
    optimizer: Optimizer | None,
    averages: ShardedEMA | None,
    extra: Mapping[str, Any],
    rank: int,
) -> Contents:
    """Return everything that this rank has to save. Tensors are not copied."""
    contents = Contents()
    tensors, others = tensors_of(model)
    for first, *shared in tensors:
        contents.parts["model", first.name] = LocalShard(first.value, first.sharding)
        for entry in shared:
            contents.aliases["model", entry.name] = ("model", first.name)
    for entry in others:
        contents.objects["model", entry.name] = serialize(entry.value)
    if optimizer is not None:
        _add_optimizer(contents, model, optimizer)
    if averages is not None:
        for entry in averages.entries():
            contents.parts["averages", "values", entry.name] = LocalShard(entry.value, entry.sharding)
        contents.objects["averages", "steps"] = serialize(averages.steps)
    for name, kept in communication_of(model).items():
        contents.parts["communication", name, "residual"] = LocalShard(kept["residual"])
        contents.objects["communication", name, "rounds"] = serialize(kept["rounds"])
    try:
        contents.objects["ranks", str(rank), "extra"] = serialize(dict(extra))
    except _PICKLE_ERRORS as error:
        where, value = _unpicklable(dict(extra), "extra")
        raise CheckpointError(
            f"{where} of rank {rank} is of the class {type(value).__name__}, which cannot be pickled ({error}). Save "
            "what describes it instead: numbers, strings, lists, dicts and tensors"
        ) from error
    contents.objects["ranks", str(rank), "random"] = serialize(get_random_state())
    return contents


def _add_optimizer(contents: Contents, model: nn.Module, optimizer: Optimizer) -> None:
    params = OptimizerParams(model, optimizer)
    for members, group in zip(params.groups, optimizer.param_groups, strict=True):
        names = [member.name for member in members]
        contents.groups[tuple(names)] = serialize({**group, "params": names})
    for member in params.members.values():
        for key, value in params.state_of(member).items():
            path = ("optimizer", "state", member.name, str(key))
            if not isinstance(value, torch.Tensor):
                contents.objects[path] = serialize(value)
                continue
            if is_plain(value, member):
                contents.may_be_shards[path] = is_shard = has_shards_shape(value, member)
                value = alias_of(cast(DTensor, member.parameter), value) if is_shard else value
            contents.parts[path] = LocalShard(value, member.sharding)


# -- what ranks tell each other before a save: they may hold different parameters, as pipeline stages do


@dataclass(frozen=True)
class Contribution:
    """One rank's param groups and plain optimizer state, as in :class:`Contents`, and its tensor subclasses by key."""

    groups: Mapping[tuple[str, ...], bytes]
    may_be_shards: Mapping[Path, bool]
    inner: Mapping[str, inner_tensors.InnerContribution]


@dataclass(frozen=True)
class Merged:
    """The contributions of all ranks together."""

    groups: Mapping[tuple[str, ...], bytes]
    are_shards: Mapping[Path, bool]
    records: Mapping[str, inner_tensors.Record]


def merge(contributions: Sequence[Contribution]) -> Merged:
    """Merge what all ranks have. If ranks have a group of the same parameters, the first rank's is used."""
    groups: dict[tuple[str, ...], bytes] = {}
    for each in contributions:
        groups = {**each.groups, **groups}
    are_shards = merge_flags(each.may_be_shards for each in contributions)
    return Merged(groups, are_shards, inner_tensors.agreed([each.inner for each in contributions]))


def check_replicated(checksums: Sequence[Mapping[str, int]]) -> None:
    """Raise unless the tensors that are saved once are equal on all ranks, which have ``checksums`` of them by key."""
    first: dict[str, tuple[int, int]] = {}
    for rank, on_rank in enumerate(checksums):
        for key, found in on_rank.items():
            first_rank, expected = first.setdefault(key, (rank, found))
            if found != expected:
                raise CheckpointError(
                    f"{key} is a plain tensor with other values on rank {rank} than on rank {first_rank}, but "
                    "only one is saved. Have the optimizer keep a DTensor, or a tensor of the local shard's shape."
                )


# -- state besides tensors


def communication_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return ``residual`` and ``rounds`` of the error-feedback codecs by name; empty if the model is not sharded."""
    return CommunicationState(model).state_dict() if states_below(model) else {}


def get_random_state() -> dict[str, Any]:
    """Return the random states of Python, torch (CPU and current accelerator), and numpy if it is imported."""
    state: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    accelerator = _accelerator()
    if accelerator is not None:
        state[accelerator] = torch.get_device_module(accelerator).get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the states from :func:`get_random_state`, except those of generators that do not exist here."""
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    accelerator = _accelerator()
    if accelerator is not None and accelerator in state:
        torch.get_device_module(accelerator).set_rng_state(state[accelerator])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))


def _accelerator() -> str | None:
    device = current_accelerator()
    return None if device is None else device.type


def _unpicklable(value: object, where: str) -> tuple[str, object]:
    """Return the innermost item of ``value`` that cannot be pickled, and its place, such as ``extra['a'][0]``."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    bad = next(((key, item) for key, item in items if not _is_picklable(item)), None)
    return (where, value) if bad is None else _unpicklable(bad[1], f"{where}[{bad[0]!r}]")


def _is_picklable(value: object) -> bool:
    try:
        serialize(value)
    except _PICKLE_ERRORS:
        return False
    return True
