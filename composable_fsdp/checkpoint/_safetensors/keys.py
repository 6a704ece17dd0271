"""The tensors of a model under the names that they have in safetensors files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from composable_fsdp.checkpoint._state_dict.names import tensors_of
from composable_fsdp.checkpoint._state_dict.shard_view import Part
from composable_fsdp.errors import ConfigurationError

__all__ = ["KeyMap", "Keyed", "keyed_tensors"]

KeyMap = Callable[[str], str] | Mapping[str, str]
"""From the names of the model to those in the file. Names that a mapping lacks are the same in both."""


@dataclass(frozen=True)
class Keyed:
    """This rank's part of a parameter or buffer.

    Attributes:
        part: of the tensor.
        names: all that it has in the model.
        keys: what files call these, in the same order.
    """

    part: Part
    names: list[str]
    keys: list[str]


def keyed_tensors(model: nn.Module, key_map: KeyMap | None) -> tuple[list[Keyed], list[str]]:
    """All parameters and persistent buffers of ``model``, each once, in the order of its state dict; and the names of
    what else that has: the extra state of modules, which may be anything.

    Raises:
        CheckpointError: some are on the meta device. Named in the text.
        ConfigurationError: ``key_map`` is none.
    """
    to_key = _as_function(key_map)
    tensors, others = tensors_of(model)
    found = []
    for entries in tensors:
        names = [entry.name for entry in entries]
        found.append(Keyed(Part(entries[0].value, entries[0].sharding), names, [to_key(name) for name in names]))
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
