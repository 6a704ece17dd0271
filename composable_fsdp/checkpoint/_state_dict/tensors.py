"""The tensors of a model: names without prefixes of wrappers, this rank's shards, and their forms in a state dict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from composable_fsdp._api.extents import (
    ShardExtent,
    assemble_full,
    extent_of,
    gather,
    has_own_memory,
    shardings_of,
    states_below,
)
from composable_fsdp._consistency.broadcast import fill_
from composable_fsdp._core.mesh import ParameterSharding
from composable_fsdp._core.params import alias_of, local_part, plain_tensors
from composable_fsdp.checkpoint._coordination import Mismatch, differ, dtype_name, said
from composable_fsdp.errors import ArgumentTypeError, CheckpointError, ConfigurationError

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
    """This rank's shard of a tensor. Final.

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

        A tensor without elements has one block on every rank, so that the checkpoint contains it too.
        """
        if 0 in self.shape:
            return {(0,) * len(self.shape): self.local.new_empty(self.shape)}
        return {box.offsets: box.of_part(self.local) for box in self.extent.boxes()}

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

        This is ``local`` itself, or a copy for a subclass or an expanded tensor, copied back at the end if ``write``.
        """
        local = self.local
        if type(local) is torch.Tensor and torch._debug_has_internal_overlap(local) != 1:
            yield local
            return
        copy = torch.empty(local.shape, dtype=local.dtype, device=local.device)
        if not write:
            try:
                copy.copy_(local)
            except Exception as error:  # the subclass's own code
                raise CheckpointError(
                    f"a {type(local).__name__} cannot be copied to a plain tensor ({said(error)}). "
                    "composable_fsdp.checkpoint.save keeps such tensors as they are."
                ) from error
        yield copy
        if write:
            fill_(local if isinstance(self.value, DTensor) else self.value, copy)


def checksum(value: torch.Tensor) -> int:
    """Return a CRC-32 of the shape, the dtype and the bytes of a tensor, or of its inner tensors."""
    found = 0
    for plain in plain_tensors(value.detach()):
        data = plain.as_subclass(torch.Tensor).cpu().contiguous().reshape(-1).view(torch.uint8)
        found = crc32(data.numpy().data, crc32(repr((tuple(plain.shape), plain.dtype)).encode(), found))
    return found


# -- forms: full, sharded and local


class _Options:
    """Base that rejects unknown options, and names the form that has them."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        known = set(cls.__dataclass_fields__)  # type: ignore[attr-defined]
        for option in options:
            owners = [form.__name__ for form in (Full, Sharded, Local) if option in form.__dataclass_fields__]
            if option not in known:
                whose = f"an option of {' and '.join(owners)}" if owners else "no option of any form"
                raise ConfigurationError(f"{option} is {whose}, not of {cls.__name__}, which has {sorted(known)}.")
        return super().__new__(cls)


@dataclass(frozen=True)
class Full(_Options):
    """Full plain tensors, with the names and shapes of the unsharded model.

    Args:
        rank0_only: only rank 0 gets values, or provides them when loading. Other ranks get, and pass, an empty dict.
        offload_to_cpu: return tensors in CPU memory. The accelerator then holds one full tensor at a time.
    """

    rank0_only: bool = False
    offload_to_cpu: bool = False


@dataclass(frozen=True)
class Sharded(_Options):
    """``DTensor``s of which each rank has its shard, as ``torch.distributed.checkpoint`` takes them.

    Args:
        offload_to_cpu: return local tensors in CPU memory, as copies unless they are there already.
    """

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class Local(_Options):
    """This rank's shards as plain tensors, empty ones included. They can be loaded with the same sharding only.

    Args:
        offload_to_cpu: return tensors in CPU memory, as copies unless they are there already.
    """

    offload_to_cpu: bool = False


Form = Full | Sharded | Local


def check_form(form: object) -> None:
    """Raise ``ArgumentTypeError`` if ``form`` is none, such as its name or its class."""
    if not isinstance(form, _Options):
        raise ArgumentTypeError(f"the form of a state dict is Full(), Sharded() or Local(), not {form!r}.")


# -- one tensor


def to_form(name: str, tensor: torch.Tensor, sharding: ParameterSharding | None, form: Form) -> torch.Tensor:
    """Return ``tensor`` in ``form``. For :class:`Full` this is a copy, and collective over the tensor's mesh."""
    if isinstance(form, Full):
        try:
            return assemble_full(tensor, sharding, form.offload_to_cpu)
        except Exception as error:  # the subclass's own code, which fails on all ranks
            local = local_part(tensor)
            if has_own_memory(local):
                raise
            raise CheckpointError(
                f"{name} cannot be gathered: its class {type(local).__name__} does not support it ({said(error)}). "
                "Use the form Sharded() or Local(), or composable_fsdp.checkpoint.save, which saves its inner tensors."
            ) from error
    value = tensor.detach()
    if isinstance(form, Local) or not isinstance(value, DTensor):
        value = local_part(value).detach()
        return value.cpu() if form.offload_to_cpu else value
    local = local_part(value)
    return alias_of(value, local.cpu() if form.offload_to_cpu else local)


def compare(name: str, target: torch.Tensor, value: object, form: Form | None, mismatch: Mismatch) -> None:
    """Add to ``mismatch`` why ``value`` cannot be loaded into ``target``. ``form`` is what the user passed."""
    is_local = isinstance(form, Local)
    shape = tuple((local_part(target) if is_local else target).shape)
    if not isinstance(value, torch.Tensor):
        mismatch.others.append(f"{name!r} is no tensor but of type {type(value).__name__}")
    elif isinstance(value, DTensor) and isinstance(form, (Full, Local)):
        mismatch.others.append(f"{name!r} is a DTensor: pass form=Sharded() instead of {type(form).__name__}()")
    elif isinstance(target, DTensor) and not isinstance(value, DTensor) and isinstance(form, Sharded):
        mismatch.others.append(f"{name!r} is a plain tensor: pass form=Full() or Local() instead of Sharded()")
    elif value.is_meta:
        mismatch.others.append(f"{name!r} is on the meta device and has no values")
    elif tuple(value.shape) != shape:
        where = " as this rank's part" if is_local and isinstance(target, DTensor) else ""
        mismatch.shapes[name] = differ(tuple(value.shape), f"{shape}{where}")
    elif _kind(value.dtype) != _kind(target.dtype):
        mismatch.dtypes[name] = differ(dtype_name(value.dtype), dtype_name(target.dtype))
    elif isinstance(value, DTensor) and not any(placement.is_partial() for placement in value.placements):
        found, wanted = tuple(local_part(value).shape), _local_shape(target, value)
        if found != wanted:
            mismatch.shapes[name] = differ(f"a local part of {found}", wanted)


def _local_shape(target: torch.Tensor, value: DTensor) -> tuple[int, ...]:
    """Return the shape that the local tensor of ``value`` must have, so that it can be redistributed.

    Placements cannot describe every uneven tensor-parallel shard that was sharded again. If ``target`` has the same
    placements, its own local shape is used.
    """
    return tuple(local_part(target).shape) if _has_same_placements(target, value) else extent_of(value).local_shape


def shard_for(
    target: torch.Tensor, sharding: ParameterSharding | None, value: torch.Tensor, form: Form | None
) -> torch.Tensor:
    """Return the values that this rank's shard of ``target`` takes from ``value``: a view of it where possible.

    Collective if ``value`` is a DTensor with other placements than ``target``: it is gathered temporarily.
    """
    if isinstance(value, DTensor):
        if _has_same_placements(target, value):
            return local_part(value)
        value = gather(value)
    elif isinstance(form, Local):
        return value
    return extent_of(target, sharding).take(value)


@torch.no_grad()
def fill(target: torch.Tensor, sharding: ParameterSharding | None, value: torch.Tensor, form: Form | None) -> None:
    """Copy this rank's shard of ``value`` into ``target``. Collective as :func:`shard_for` is."""
    fill_(local_part(target), shard_for(target, sharding, value.detach(), form))


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    return "float" if dtype.is_floating_point else "bool" if dtype == torch.bool else "integer"


def _has_same_placements(target: Any, value: DTensor) -> bool:
    """Return whether both have the same placements on the same ranks, on any device. All ranks get the same answer."""
    if not isinstance(target, DTensor) or target.placements != value.placements:
        return False
    here, there = target.device_mesh, value.device_mesh
    return here == there or torch.equal(here.mesh, there.mesh)
