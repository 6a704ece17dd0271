"""The tensors of a model under their names in safetensors files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from composable_fsdp.checkpoint._state_dict.names import prepare_for_access, tensors_of
from composable_fsdp.checkpoint._state_dict.shard_view import LocalShard
from composable_fsdp.errors import ConfigurationError

__all__ = ["KeyMap", "KeyedTensor", "keyed_tensors"]

KeyMap = Callable[[str], str] | Mapping[str, str]
"""Maps names in the model to names in the files. Names that a mapping lacks are the same in both."""


@dataclass(frozen=True)
class KeyedTensor:
    """This rank's shard of a parameter or buffer.

    Attributes:
        part: the shard.
        names: all names of the tensor in the model.
        keys: the names in the files, in the same order.
    """

    part: LocalShard
    names: list[str]
    keys: list[str]


def keyed_tensors(model: nn.Module, key_map: KeyMap | None) -> tuple[list[KeyedTensor], list[str]]:
    """Prepare ``model`` for access, and return its parameters and persistent buffers, and the names of its extra state.

    Raises:
        CheckpointError: tensors are on the meta device. The text names them.
        ConfigurationError: ``key_map`` is neither a mapping nor a callable.
    """
    to_key = _as_function(key_map)
    prepare_for_access(model)
    tensors, others = tensors_of(model)
    found = []
    for entries in tensors:
        names = [entry.name for entry in entries]
        found.append(
            KeyedTensor(LocalShard(entries[0].value, entries[0].sharding), names, [to_key(name) for name in names])
        )
    return found, [entry.name for entry in others]


def _as_function(key_map: KeyMap | None) -> Callable[[str], str]:
    if key_map is None:
        return lambda name: name
    if isinstance(key_map, Mapping):
        mapping = key_map
        return lambda name: mapping.get(name, name)
    if callable(key_map):
        return key_map
    raise ConfigurationError(f"key_map must be a mapping or a callable of names, not {type(key_map).__name__}.")
