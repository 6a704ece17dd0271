"""The tensors of a model under the names that they have in files, and this rank's part of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_fsdp.broadcast import fill_
from composable_fsdp.checkpoint.names import entries_of
from composable_fsdp.errors import CheckpointError, ConfigurationError
from composable_fsdp.layout.extent import Box, Extent
from composable_fsdp.placed import extent_of
from composable_fsdp.sharding import ParameterSharding

__all__ = ["Held", "KeyMap", "block", "held_tensors"]

KeyMap = Callable[[str], str] | Mapping[str, str]
"""From the names of the model to those in the file. Names that a mapping lacks are the same in both."""


@dataclass(frozen=True, eq=False)
class Held:
    """A parameter or buffer, all of whose names are in ``names``, and under ``keys`` in files, in the same order."""

    value: torch.Tensor
    sharding: ParameterSharding | None
    names: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self.value.shape)

    @cached_property
    def extent(self) -> Extent:
        """This rank's part."""
        return extent_of(self.value, self.sharding)

    @property
    def local_numel(self) -> int:
        return prod(self.extent.local_shape)

    @property
    def local_nbytes(self) -> int:
        return self.local_numel * self.value.dtype.itemsize

    @cached_property
    def local(self) -> torch.Tensor:
        """The memory of this rank's part."""
        value = self.value.detach()
        return value.to_local() if isinstance(value, DTensor) else value

    @contextmanager
    def plain(self, *, write: bool) -> Iterator[torch.Tensor]:
        """This rank's part as a plain tensor, which may be viewed and written block by block; writes stay with
        ``write``. It is the part's own memory, but a copy of a tensor of a class of its own, and of an expanded one.
        """
        local = self.local
        if type(local) is torch.Tensor and torch._debug_has_internal_overlap(local) != 1:
            yield local
            return
        part = torch.empty(local.shape, dtype=local.dtype, device=local.device)
        if not write:
            part.copy_(local)
        yield part
        if write:
            fill_(local if isinstance(self.value, DTensor) else self.value, part)


def block(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The view of ``box`` in this rank's part."""
    for dim, (offset, size) in enumerate(zip(box.local_offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def held_tensors(model: nn.Module, key_map: KeyMap | None) -> tuple[list[Held], list[str]]:
    """All parameters and persistent buffers of ``model``, each once, in the order of its state dict; and the names of
    what else that has: the extra state of modules, which may be anything.

    Raises:
        CheckpointError: some are on the meta device. Named in the text.
    """
    to_key = _as_function(key_map)
    found: dict[int, Held] = {}
    others = []
    for name, entry in entries_of(model).items():
        if not entry.is_tensor or name.endswith(nn.modules.module._EXTRA_STATE_KEY_SUFFIX):
            others.append(name)
            continue
        held = found.setdefault(id(entry.value), Held(entry.value, entry.sharding))
        held.names.append(name)
        held.keys.append(to_key(name))
    on_meta = [held.names[0] for held in found.values() if held.value.is_meta]
    if on_meta:
        raise CheckpointError(
            f"these tensors are on the meta device and have no memory: {', '.join(on_meta)}. Call "
            "composable_fsdp.to_empty(model, device=...) first."
        )
    return list(found.values()), others


def _as_function(key_map: KeyMap | None) -> Callable[[str], str]:
    if key_map is None:
        return lambda name: name
    if isinstance(key_map, Mapping):
        mapping = key_map
        return lambda name: mapping.get(name, name)
    if callable(key_map):
        return key_map
    raise ConfigurationError(f"key_map must be a mapping or a callable of names, not {type(key_map).__name__}.")
