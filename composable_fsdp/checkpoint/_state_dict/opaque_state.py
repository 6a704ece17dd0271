"""Optimizer state of tensor classes that cannot be cut like their parameter, such as 8-bit state with scales of blocks.

Each rank's tensor of such a class is written as a pickle, as ``torch.distributed.checkpoint`` does. A rank that has the
shard of the save gets the same inner tensors. On another mesh, ``narrow`` of the class is tried. Where it cannot cut,
the values are copied to plain tensors and from there to the class, which quantizes them again. That is not exact:
signed codes of 8 bits have no -1, so a block whose largest value is negative gets another scale.

Of a file, only the inner tensors are used, of a class that the optimizer itself makes here.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.optim import Optimizer
from torch.serialization import get_safe_globals, safe_globals

from composable_fsdp._core.memory import is_accelerator
from composable_fsdp._core.params import is_wrapper, local_part
from composable_fsdp._extents import ShardExtent
from composable_fsdp._files import open_regular
from composable_fsdp.checkpoint._coordination import said
from composable_fsdp.checkpoint._state_dict.inner_tensors import can_be_cut, context_of, inner_of
from composable_fsdp.checkpoint._state_dict.tensors import LocalShard
from composable_fsdp.errors import CheckpointError
from composable_fsdp.optim._replaced_step import class_step


class Piece(NamedTuple):
    """A tensor of a checkpoint, which begins at ``offsets`` of the whole one."""

    offsets: Sequence[int]
    tensor: torch.Tensor


def is_opaque(value: object) -> bool:
    local = local_part(value) if isinstance(value, torch.Tensor) else value
    return is_wrapper(local) and not can_be_cut(cast(torch.Tensor, local))


def with_inner(tensor: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return a tensor of the class of ``tensor`` with the results of ``change`` in place of its inner tensors."""
    if not is_wrapper(tensor):
        return change(tensor)
    names, context = tensor.__tensor_flatten__()
    inner = {name: with_inner(getattr(tensor, name), change) for name in names}
    made: torch.Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
    return made


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain copy of the values of ``tensor``, at least in fp32."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return torch.empty(tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor)


def state_of_step(optimizer: Optimizer, parameter: torch.Tensor, shape: Sequence[int]) -> dict[Any, Any]:
    """Return the state that ``optimizer`` makes in its first step of a plain tensor of ``shape`` like ``parameter``.

    A copy of the optimizer steps zeros, so nothing else changes.

    Raises:
        CheckpointError: it cannot.
    """
    local = local_part(parameter)
    zeros = torch.zeros(tuple(shape), dtype=local.dtype, device=local.device, requires_grad=True)
    zeros.grad = torch.zeros_like(zeros)
    group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
    copied = object.__new__(type(optimizer))
    copied.__dict__ = {**vars(optimizer), "state": defaultdict(dict), "param_groups": [{**group, "params": [zeros]}]}
    device = [local.device] if is_accelerator(local.device) else []
    stance = cast(Any, torch.compiler).set_stance("force_eager")
    try:
        with torch.inference_mode(False), torch.random.fork_rng(device, device_type=local.device.type), stance:
            class_step(optimizer)(copied)
    except Exception as error:  # the optimizer's own code
        raise CheckpointError(f"a copy of this optimizer cannot step ({said(error)}). Step it once first") from error
    return cast(dict[Any, Any], copied.state[zeros])


# -- files


def classes_of(tensor: Any) -> set[type]:
    """Return the class of a wrapper and of its inner wrappers; of a plain tensor none."""
    if not is_wrapper(tensor):
        return set()
    return {type(tensor)}.union(*(classes_of(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]))


def pickled(tensor: torch.Tensor) -> bytes:
    data = io.BytesIO()
    torch.save(with_inner(tensor, lambda inner: inner.detach().to("cpu", copy=True).contiguous()), data)
    return data.getvalue()


def unpickled(data: bytes, classes: set[type]) -> torch.Tensor:
    """Return the tensor that :func:`pickled` wrote, which is plain or of one of ``classes``."""
    known = get_safe_globals()  # safe_globals would take them away at its end
    with safe_globals([each for each in classes if each not in known]):
        try:
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError("it has objects of other classes") from error
    if type(found) not in (torch.Tensor, *classes):
        raise CheckpointError(f"it is a {type(found).__name__}")
    return cast(torch.Tensor, found)


def is_pickled(metadata: Metadata, key: str) -> bool:
    """Return whether a chunk of ``key`` has fewer bytes than plain values: torch's metadata does not name its class."""
    saved = cast(TensorStorageMetadata, metadata.state_dict_metadata[key])
    places = ((chunk, metadata.storage_data[MetadataIndex(key, chunk.offsets)]) for chunk in saved.chunks)
    itemsize = saved.properties.dtype.itemsize
    return any(p.length < prod(c.sizes) * itemsize and not p.transform_descriptors for c, p in places)


OpaqueChunks = list[tuple[ChunkStorageMetadata, set[type]]]
"""The chunks of optimizer state that was saved as pickles, and the classes that each may have."""


def chunks_of(part: LocalShard, saved: TensorStorageMetadata, made: Callable[[torch.Size], Any]) -> OpaqueChunks:
    """Return the chunks of which the shard ``part`` has elements.

    ``made`` returns the tensor that the optimizer makes for a shape: a chunk may have its class if ``part`` is plain.
    """
    own = classes_of(part.local)
    return [(c, own or classes_of(made(c.sizes))) for c in saved.chunks if _overlap(part.extent, c)]


def read_chunks(folder: Path, metadata: Metadata, key: str, chunks: OpaqueChunks) -> Iterator[Piece]:
    """Read ``chunks`` of ``key`` from a checkpoint."""
    for chunk, classes in chunks:
        place = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
        try:
            with io.BufferedReader(open_regular(folder, place.relative_path)) as file:
                file.seek(place.offset)
                found = unpickled(file.read(place.length), classes)
            if found.shape != chunk.sizes:
                raise CheckpointError(f"it has the shape {tuple(found.shape)} where {tuple(chunk.sizes)} was saved")
        except Exception as error:  # damaged bytes may raise anything
            names = ", ".join(sorted(each.__name__ for each in classes)) or "plain tensor"
            raise CheckpointError(f"{key} cannot be read as a {names} of this optimizer: {said(error)}") from error
        yield Piece(chunk.offsets, found)


def _overlap(extent: ShardExtent, chunk: ChunkStorageMetadata) -> bool:
    dims = zip(extent.ranges, chunk.offsets, chunk.sizes, strict=True)
    return all(any(max(r.start, at) < min(r.stop, at + n) for r in ranges) for ranges, at, n in dims)


def quantized_text(keys: Sequence[str]) -> str:
    return (
        f"{len(keys)} tensors of optimizer state, such as {keys[0]}, were dequantized and quantized again, which "
        "rounds their values: their blocks were saved in other shards. On the mesh and the number of ranks of the save "
        "they are loaded exactly."
    )


# -- memory


@torch.no_grad()
def fill_opaque(target: LocalShard, pieces: Iterable[Piece]) -> bool:
    """Copy ``pieces`` of the whole tensor to the shard ``target``. Return whether its class has changed values."""
    local, boxes = target.local, list(target.extent.boxes())
    values = torch.empty(0)
    is_exact = True
    for offsets, piece in pieces:
        is_same_shard = len(boxes) == 1 and boxes[0].offsets == tuple(offsets) and piece.shape == local.shape
        if is_same_shard and copy_inner(local, piece, any_context=False):
            return False
        if not values.numel():
            values = torch.empty(local.shape, dtype=torch.promote_types(local.dtype, torch.float32))
        plain = values_of(piece)
        for box in boxes:
            spans = list(zip(box.offsets, box.local_offsets, box.sizes, offsets, piece.shape, strict=True))
            starts = [max(at, begin) for at, _, _, begin, _ in spans]
            sizes = [min(at + n, begin + m) - s for (at, _, n, begin, m), s in zip(spans, starts, strict=True)]
            if any(size <= 0 for size in sizes):
                continue
            here = [(own + s - at, n) for (at, own, *_), s, n in zip(spans, starts, sizes, strict=True)]
            there = [(s - begin, n) for (*_, begin, _), s, n in zip(spans, starts, sizes, strict=True)]
            _cut(values, here).copy_(_cut(plain, there))
            is_exact = is_exact and _copied_by_class(local, here, piece, there)
    if not values.numel():
        return False
    values = values.to(local.device)
    if is_exact and torch.equal(values_of(local), values):
        return False
    local.copy_(values)
    return is_wrapper(local) and not torch.equal(values_of(local), values)


def copy_inner(target: Any, source: Any, *, any_context: bool) -> bool:
    """Copy the inner tensors, if both are of one class and have the same. Return False, and copy nothing, if not."""
    if type(target) is not type(source) or not is_wrapper(target):
        return False
    if not any_context and context_of(target) != context_of(source):
        return False
    own, given = inner_of(target), inner_of(source)
    if {n: (t.shape, t.dtype) for n, t in own.items()} != {n: (t.shape, t.dtype) for n, t in given.items()}:
        return False
    for name, inner in own.items():
        inner.copy_(given[name])
    return True


_Spans = Sequence[tuple[int, int]]
"""The start and the size in each dim."""


def _cut(tensor: torch.Tensor, spans: _Spans) -> torch.Tensor:
    for dim, (start, size) in enumerate(spans):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, size)
    return tensor


def _copied_by_class(local: torch.Tensor, here: _Spans, piece: torch.Tensor, there: _Spans) -> bool:
    try:
        return copy_inner(_cut(local, here), _cut(piece, there), any_context=True)
    except Exception:  # the class's own code: any error means that it cannot be cut there
        return False
