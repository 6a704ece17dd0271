"""The tensors of a model: names without prefixes of wrappers, and this rank's shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from composable_fsdp._consistency.process_groups import fill_
from composable_fsdp._core.mesh import ParameterSharding
from composable_fsdp._core.params import is_wrapper, local_part, plain_tensors
from composable_fsdp._core.state import states_below
from composable_fsdp._extents import ShardExtent, extent_of, has_own_memory, plain_name, shardings_of
from composable_fsdp.checkpoint._coordination import said
from composable_fsdp.errors import CheckpointError

K = TypeVar("K")
V = TypeVar("V")


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
        state.reshard()
        state.group.refresh()


def entries_of(model: nn.Module) -> dict[str, Entry]:
    """Return the entries of ``model.state_dict()`` by plain names, in its order. The model must be prepared."""
    shardings = shardings_of(states_below(model))
    state = model.state_dict(keep_vars=True)
    entries: dict[str, Entry] = {}
    for key, value in state.items():
        entry = Entry(plain_name(key), value, shardings.get(id(value)), key)
        other = entries.setdefault(entry.name, entry)
        if other is not entry:
            raise CheckpointError(
                f"{other.key!r} and {key!r} are both {entry.name!r} without parts of wrappers. Rename the attribute."
            )
    return entries


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


def check_parts(plans: Sequence[SavePlan]) -> None:
    """Raise if ranks plan to write different tensors of the same name, or together not all of one.

    DCP writes one block of those that begin at the same place, without a look at their shapes.
    """
    first: dict[str, tuple[int, TensorWriteData]] = {}
    written: dict[str, dict[torch.Size, int]] = {}
    problems: dict[str, str] = {}
    for rank, plan in enumerate(plans):
        for name, data in ((item.index.fqn, item.tensor_data) for item in plan.items):
            if data is None:
                continue
            of, other = first.setdefault(name, (rank, data))
            if (data.size, data.properties.dtype) != (other.size, other.properties.dtype):
                problems[name] = f"{name} has another shape or dtype on rank {rank} than on rank {of}"
            written.setdefault(name, {})[data.chunk.offsets] = prod(data.chunk.sizes)
    for name, (_, data) in first.items():
        count, total = sum(written[name].values()), prod(data.size)
        if count != total:
            problems.setdefault(name, f"of {name} all ranks together have {count} instead of {total} elements")
    if problems:
        raise CheckpointError(f"ranks do not hold the parts of one model: {'; '.join(problems.values())}.")


class LocalShard:
    """This rank's shard of a tensor.

    ``sharding`` is its sharding by ``fully_shard``, if any. ``extent`` is that of the plain tensor ``value`` in a
    larger tensor, if it is a piece of one.
    """

    def __init__(
        self, value: torch.Tensor, sharding: ParameterSharding | None = None, *, extent: ShardExtent | None = None
    ) -> None:
        self.value = value
        self.sharding = sharding
        self._given = extent

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the global tensor."""
        return tuple(self.value.shape) if self._given is None else self._given.shape

    @cached_property
    def extent(self) -> ShardExtent:
        """The extent of the shard in the global tensor."""
        return extent_of(self.value, self.sharding) if self._given is None else self._given

    @cached_property
    def local(self) -> torch.Tensor:
        """The shard's memory, shaped like the extent; a plain view if the subclass has no ``__torch_dispatch__``."""
        local = local_part(self.value).detach()
        is_special = type(local) is not torch.Tensor and has_own_memory(local)
        return local.as_subclass(torch.Tensor) if is_special else local

    @cached_property
    def blocks(self) -> dict[tuple[int, ...], torch.Tensor]:
        """Contiguous blocks of the global tensor by offset, as views of the shard's memory.

        A tensor without elements has one block on every rank, so that the checkpoint contains it too. A wrapper whose
        class cannot cut it into several has their values.
        """
        if 0 in self.shape:
            return {(0,) * len(self.shape): self.local.new_empty(self.shape)}
        boxes, local = list(self.extent.boxes()), self.local
        if is_wrapper(local) and len(boxes) == 1:
            return {boxes[0].offsets: local}
        try:
            return {box.offsets: box.of_part(local) for box in boxes}
        except Exception:  # the subclass's own code
            with self.plain(write=False) as local:
                return {box.offsets: box.of_part(local) for box in boxes}

    # DCP's planners call these methods, to write and to read the blocks.

    def __create_write_items__(self, key: str, _: object) -> list[WriteItem]:
        items = []
        for chunk, block in zip(self.__create_chunk_list__(), self.blocks.values(), strict=True):
            data = TensorWriteData(chunk, TensorProperties(dtype=block.dtype), torch.Size(self.shape))
            items.append(WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), block.shape) for at, block in self.blocks.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.blocks[tuple(index.offset)]

    @contextmanager
    def plain(self, *, write: bool) -> Iterator[torch.Tensor]:
        """Yield the shard as a plain tensor that can be viewed and written block by block.

        This is ``local`` itself, or a copy for a subclass, an expanded tensor, or a conjugate or negative view, copied
        back at the end if ``write``.
        """
        local = self.local
        is_lazy = local.is_conj() or local.is_neg()
        if type(local) is torch.Tensor and not is_lazy and torch._debug_has_internal_overlap(local) != 1:
            yield local
            return
        copy = torch.empty(local.shape, dtype=local.dtype, device=local.device)
        if not write:
            try:
                copy.copy_(local)
            except Exception as error:  # the subclass's own code
                raise CheckpointError(
                    f"a {type(local).__name__} cannot be copied to a plain tensor ({said(error)}). Use checkpoint.save."
                ) from error
        yield copy
        if write:
            fill_(local if isinstance(self.value, DTensor) else self.value, copy)


def checksum(value: torch.Tensor) -> int:
    """Return a CRC-32 of the shape, the dtype and the bytes of a tensor, or of its inner tensors."""
    found = 0
    for plain in plain_tensors(value.detach()):
        own = plain.as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg()
        data = own.contiguous().reshape(-1).view(torch.uint8)
        found = crc32(data.numpy().data, crc32(repr((tuple(plain.shape), plain.dtype)).encode(), found))
    return found


def differences(checksums: Mapping[int, Mapping[K, V]]) -> Iterator[tuple[K, int, int]]:
    """Yield each key with another checksum on some rank than on the first rank that has the key, and both ranks."""
    first: dict[K, tuple[int, V]] = {}
    for rank, on_rank in checksums.items():
        for key, found in on_rank.items():
            first_rank, expected = first.setdefault(key, (rank, found))
            if found != expected:
                yield key, rank, first_rank
