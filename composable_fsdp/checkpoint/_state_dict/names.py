"""The names under which users know what a model holds: those of the model before anything wrapped it."""

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

__all__ = ["Entry", "at_rest", "entries_of", "on_meta", "parameter_names", "plain_name", "tensors_of"]

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""What activation-checkpoint wrappers of torch and ``torch.compile`` put into names."""


def plain_name(name: str) -> str:
    """``name`` without what wrappers put into it."""
    for prefix in _WRAPPERS:
        name = name.replace(prefix, "")
    return name


@dataclass(frozen=True)
class Entry:
    """What a state dict has under one name.

    ``value`` is the parameter or buffer itself, or whatever a module's ``get_extra_state`` gave. ``sharding`` says how
    ``fully_shard`` cut it, if it did. ``key`` is the name that the model's own methods have, with what wrappers put in.
    Shared tensors have an entry under each of their names, with the same ``value``.
    """

    name: str
    value: Any
    sharding: ParameterSharding | None = None
    key: str = ""

    @property
    def is_tensor(self) -> bool:
        """Whether it is a parameter or buffer. Extra state may be a tensor too, but of any shape at any time."""
        return isinstance(self.value, torch.Tensor) and self.name.rpartition(".")[2] != _EXTRA_STATE_KEY_SUFFIX


def at_rest(model: nn.Module) -> dict[int, ParameterSharding]:
    """Has ``model`` show its parameters in their sharded form. Returns how each is cut, by its id."""
    states = states_below(model)
    for state in states:
        state.deliver_before_changes()
        state.group.reshard()
        state.group.refresh()
    return shardings_of(states)


def entries_of(model: nn.Module) -> dict[str, Entry]:
    """All that ``model.state_dict()`` has, by plain names, in its order. Parameters are in their sharded form."""
    shardings = at_rest(model)
    state = model.state_dict(keep_vars=True)
    entries = (Entry(plain_name(k), value, shardings.get(id(value)), k) for k, value in state.items())
    return {entry.name: entry for entry in entries}


def tensors_of(model: nn.Module) -> tuple[list[list[Entry]], list[Entry]]:
    """The entries of each parameter and buffer, several if it is shared, and those of anything else.

    Raises:
        CheckpointError: some are on the meta device. Named in the text.
    """
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
    """A sentence about those of the named ``tensors`` that are on the meta device, if there are any."""
    names = [name for name, tensor in tensors if tensor.is_meta]
    if not names:
        return []
    where = "on the meta device and have no memory"
    return [f"these are {where}: {', '.join(names)}. Call composable_fsdp.to_empty(model, device=...) first."]


def parameter_names(model: nn.Module) -> dict[int, str]:
    """The first plain name of every parameter, by its id, in the order of ``model.parameters()``."""
    return {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
