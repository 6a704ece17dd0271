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

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from composable_fsdp._api.communication_state import CommunicationState
from composable_fsdp._api.extents import states_below
from composable_fsdp._core.memory import current_accelerator
from composable_fsdp.checkpoint._state_dict import inner_tensors
from composable_fsdp.checkpoint._state_dict.ema import ShardedEMA
from composable_fsdp.checkpoint._state_dict.optimizer import OptimizerParams, check_replicated, is_plain, on_host
from composable_fsdp.checkpoint._state_dict.tensors import LocalShard, checksum, tensors_of

__all__ = ["Contents", "Contribution", "Path", "communication_of", "contents_of", "key_of", "merge", "set_random_state"]

Path = tuple[str, ...]
"""The path of a value in a nested state dict. Joined by dots, it is the key in the checkpoint."""

Groups = Mapping[tuple[str, ...], Mapping[str, Any]]
"""The param groups of an optimizer by the names of their parameters, with these in ``params``."""


def key_of(path: Path) -> str:
    return ".".join(path)


@dataclass(frozen=True)
class Contribution:
    """What ranks tell each other before a save: they may hold different parameters, as pipeline stages do.

    ``inner`` describes tensor subclasses by key: on one rank, or, after :func:`merge`, on all of them.
    """

    groups: Groups
    replicated: Mapping[str, int]
    inner: Mapping[str, Any]


def merge(contributions: Sequence[Contribution]) -> Contribution:
    """Merge what all ranks have. If ranks have a group of the same parameters, the first rank's is used."""
    check_replicated({rank: each.replicated for rank, each in enumerate(contributions)})
    groups = {members: group for each in contributions[::-1] for members, group in each.groups.items()}
    return Contribution(groups, {}, inner_tensors.agreed([each.inner for each in contributions]))


@dataclass
class Contents:
    """The state of one rank, by path.

    Attributes:
        parts: local shards of tensors. A block that several ranks hold is written by one of them.
        objects: all other values. If several ranks have a key, one of them writes it.
        aliases: further paths of tensors in ``parts``, with the path there.
        replicated: checksums of the plain tensors in ``parts`` that must be equal on all ranks, by key.
        groups: see :data:`Groups`.
    """

    parts: dict[Path, LocalShard] = field(default_factory=dict)
    objects: dict[Path, Any] = field(default_factory=dict)
    aliases: dict[Path, Path] = field(default_factory=dict)
    replicated: dict[str, int] = field(default_factory=dict)
    groups: dict[tuple[str, ...], dict[str, Any]] = field(default_factory=dict)

    def add_optimizer(self, model: nn.Module, optimizer: Optimizer) -> None:
        params = OptimizerParams(model, optimizer)
        for members, group in zip(params.groups, optimizer.param_groups, strict=True):
            names = [member.name for member in members]
            self.groups[tuple(names)] = {**{key: on_host(value) for key, value in group.items()}, "params": names}
        for member in params.members.values():
            for key, value in params.state_of(member).items():
                path = ("optimizer", "state", member.name, str(key))
                if not isinstance(value, torch.Tensor):
                    self.objects[path] = value
                    continue
                self.parts[path] = LocalShard(value, member.sharding)
                if is_plain(value, member):
                    self.replicated[key_of(path)] = checksum(value)

    def add_rank(self, model: nn.Module, rank: int, extra: Mapping[str, Any]) -> None:
        """Add the state that belongs to this rank alone."""
        for name, kept in communication_of(model).items():
            self.parts["communication", name, "residual"] = LocalShard(kept["residual"])
            self.objects["communication", name, "rounds"] = kept["rounds"]
        self.objects["ranks", str(rank), "extra"] = extra
        self.objects["ranks", str(rank), "random"] = _random_state()

    def contribution(self) -> Contribution:
        """Return what the other ranks must know of this rank's contents."""
        parts = {key_of(path): part for path, part in self.parts.items()}
        for key, part in parts.items():
            inner_tensors.refuse_unknown(key, part)
        inner = {k: inner_tensors.inner_contribution_of(p) for k, p in parts.items() if inner_tensors.has_inner(p)}
        return Contribution(self.groups, self.replicated, inner)

    def settle(self, merged: Contribution) -> None:
        """Add the groups of all ranks, and replace each tensor subclass by its inner tensors and its record."""
        if merged.groups:
            self.objects["optimizer", "param_groups"] = list(merged.groups.values())
        for path in [path for path in self.parts if key_of(path) in merged.inner]:
            part, record = self.parts.pop(path), merged.inner[key_of(path)]
            aliases = [alias for alias, of in self.aliases.items() if of == path]
            for each in (path, *aliases):
                self.aliases.pop(each, None)
                self.objects["classes", key_of(each)] = replace(record, path=each).encoded()
            for suffix, inner in inner_tensors.parts_of(part, record).items():
                own = (*path[:-1], path[-1] + suffix)
                self.parts[own] = inner
                self.aliases |= {(*alias[:-1], alias[-1] + suffix): own for alias in aliases}


def contents_of(model: nn.Module, averages: ShardedEMA | None) -> Contents:
    """Return the tensors and extra states of ``model``, which is prepared, and ``averages``. Nothing is copied."""
    contents = Contents()
    tensors, others = tensors_of(model)
    for first, *shared in tensors:
        contents.parts["model", first.name] = LocalShard(first.value, first.sharding)
        contents.aliases |= {("model", entry.name): ("model", first.name) for entry in shared}
    contents.objects = {("model", entry.name): entry.value for entry in others}
    if averages is not None:
        for entry in averages.entries():
            contents.parts["averages", "values", entry.name] = LocalShard(entry.value, entry.sharding)
        contents.objects["averages", "steps"] = averages.steps
    return contents


def communication_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return ``residual`` and ``rounds`` of the error-feedback codecs by name; empty if the model is not sharded."""
    return CommunicationState(model).state_dict() if states_below(model) else {}


# -- random number generators


def _random_state() -> dict[str, Any]:
    """Return the random states of Python, torch (CPU and current accelerator), and numpy if it is imported."""
    state: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if (accelerator := current_accelerator()) is not None:
        state[accelerator.type] = torch.get_device_module(accelerator.type).get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the states that :func:`_random_state` returned, except those of generators that do not exist here."""
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    accelerator = current_accelerator()
    if accelerator is not None and accelerator.type in state:
        torch.get_device_module(accelerator.type).set_rng_state(state[accelerator.type])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))
