"""Names of a model's tensors as its user knows them: without the prefixes that wrappers add."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from composable_fsdp._runtime.shard_extent import shardings_of, states_below
from composable_fsdp._sharding.param_sharding import ParameterSharding
from composable_fsdp.errors import CheckpointError

__all__ = ["Entry", "entries_of", "on_meta", "parameter_names", "plain_name", "prepare_for_access", "tensors_of"]

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""Prefixes that torch's activation-checkpoint wrappers and ``torch.compile`` add to names."""


def plain_name(name: str) -> str:
    for prefix in _WRAPPERS:
        name = name.replace(prefix, "")
    return name


@dataclass(frozen=True)
class Entry:
    """The entry of a state dict under one name.

    ``value`` is the parameter or buffer itself, or what a module's ``get_extra_state`` returned. ``sharding`` is its
    sharding by ``fully_shard``, if any. ``key`` is the name in the model's own methods, with the prefixes of wrappers.
    Tied tensors have an entry under each of their names, with the same ``value``.
    """

    name: str
    value: Any
    sharding: ParameterSharding | None = None
    key: str = ""

    @property
    def is_tensor(self) -> bool:
        """True for a parameter or buffer, but not for extra state: that may be a tensor of any shape at any time."""
        return isinstance(self.value, torch.Tensor) and self.name.rpartition(".")[2] != _EXTRA_STATE_KEY_SUFFIX


def prepare_for_access(model: nn.Module) -> None:
    """Complete pending changes of ``model`` and reshard its parameters, so that its state can be read and written.

    Each public operation on state calls this once, before it looks at any parameter.
    """
    for state in states_below(model):
        state.drain_before_changes()
        state.group.reshard()
        state.group.refresh()


def entries_of(model: nn.Module) -> dict[str, Entry]:
    """Return the entries of ``model.state_dict()`` by plain names, in its order. The model must be prepared."""
    shardings = shardings_of(states_below(model))
    state = model.state_dict(keep_vars=True)
    entries = (Entry(plain_name(k), value, shardings.get(id(value)), k) for k, value in state.items())
    return {entry.name: entry for entry in entries}


def tensors_of(model: nn.Module) -> tuple[list[list[Entry]], list[Entry]]:
    """Return the entries of each parameter and buffer, several for a shared tensor, and the entries of extra state."""
    shared: dict[int, list[Entry]] = {}
    others = []
    for entry in entries_of(model).values():
        if entry.is_tensor:
            shared.setdefault(id(entry.value), []).append(entry)
        else:
            others.append(entry)
    for problem in on_meta((entries[0].name, entries[0].value) for entries in shared.values()):
        raise CheckpointError(problem)
    return list(shared.values()), others


def on_meta(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return an error text that names those of ``tensors`` that are on the meta device, or an empty list."""
    names = [name for name, tensor in tensors if tensor.is_meta]
    if not names:
        return []
    where = "on the meta device and have no memory"
    return [f"these are {where}: {', '.join(names)}. Call composable_fsdp.to_empty(model, device=...) first."]


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return the first plain name of every parameter, by its id, in the order of ``model.parameters()``."""
    return {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
