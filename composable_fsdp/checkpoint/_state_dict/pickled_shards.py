"""Tensors of classes with inner tensors in checkpoints, such as 8-bit optimizer state and quantized weights.

A subclass without ``__torch_dispatch__`` has its own memory, and a plain view of it is saved. Each rank's shard of any
other class is written as a pickle, as ``torch.distributed.checkpoint`` does. ``classes.<key>`` is the class's name.

A rank that has the shard of the save gets the same inner tensors. On another mesh the class cuts both tensors
(``narrow``). Where it cannot, the values are copied to plain tensors and from there to the class, which quantizes them
again. That is not exact: signed codes of 8 bits have no -1, so a block whose largest value is negative gets another
scale.

Of a file, only the inner tensors are used, of a class that the model or the optimizer itself makes here.
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
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.optim import Optimizer
from torch.serialization import get_safe_globals, safe_globals

from composable_fsdp._core.memory import is_accelerator
from composable_fsdp._core.params import is_wrapper, local_part, plain_tensors
from composable_fsdp._extents import Box, ShardExtent, has_own_memory, storage_addresses
from composable_fsdp._files import open_regular
from composable_fsdp.checkpoint._archive import check_archive
from composable_fsdp.checkpoint._coordination import said
from composable_fsdp.checkpoint._state_dict.tensors import LocalShard, checksum
from composable_fsdp.errors import CheckpointError
from composable_fsdp.optim._replaced_step import class_step


class Piece(NamedTuple):
    """A tensor of a checkpoint, which begins at ``offsets`` of the whole one."""

    offsets: Sequence[int]
    tensor: torch.Tensor


def refuse_unknown(key: str, part: LocalShard) -> None:
    """Raise ``CheckpointError`` if the class of ``part`` has ``__torch_dispatch__``, but no ``__tensor_flatten__``."""
    for tensor in plain_tensors(part.local):
        if not has_own_memory(tensor):
            raise CheckpointError(
                f"{key} cannot be saved: the class {class_name(tensor)} has __torch_dispatch__ and no "
                "__tensor_flatten__. Give it that and __tensor_unflatten__, or leave the tensor out of the state dict."
            )


def class_name(tensor: torch.Tensor) -> str:
    return f"{type(tensor).__module__}.{type(tensor).__qualname__}"


def with_inner(tensor: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return a tensor of the class of ``tensor`` with the results of ``change`` in place of its inner tensors."""
    if not is_wrapper(tensor):
        return change(tensor)
    names, context = tensor.__tensor_flatten__()
    inner = {name: with_inner(getattr(tensor, name), change) for name in names}
    made: torch.Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
    return made


def is_opaque(value: Any) -> bool:
    """Return whether the class of ``value`` cannot be cut, as of blocks across rows. So DTensor cannot gather it."""
    local = local_part(value)
    if not is_wrapper(local):
        return False
    try:
        local.chunk(2)
    except Exception:  # the class's own code
        return True
    return False


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain copy of the values of ``tensor``, at least in fp32."""
    values = torch.empty(tensor.shape, dtype=torch.promote_types(tensor.dtype, torch.float32), device=tensor.device)
    values.copy_(tensor)
    return values


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
    check_archive(file := io.BytesIO(data))
    known = get_safe_globals()  # safe_globals would take them away at its end
    with safe_globals([each for each in classes if each not in known]):
        try:
            found = torch.load(file, map_location="cpu", weights_only=True)
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


def read_pieces(folder: Path, metadata: Metadata, key: str, extent: ShardExtent, classes: set[type]) -> Iterator[Piece]:
    """Read the chunks of ``key`` that have elements of ``extent``. Each is a plain tensor or of ``classes``."""
    for chunk in cast(TensorStorageMetadata, metadata.state_dict_metadata[key]).chunks:
        if not any(_common(box, chunk.offsets, chunk.sizes) for box in extent.boxes()):
            continue
        place = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
        try:
            with io.BufferedReader(open_regular(folder, place.relative_path)) as file:
                file.seek(place.offset)
                found = unpickled(file.read(place.length), classes)
            if found.shape != chunk.sizes:
                raise CheckpointError(f"it has the shape {tuple(found.shape)} where {tuple(chunk.sizes)} was saved")
        except Exception as error:  # damaged bytes may raise anything
            names = ", ".join(sorted(each.__name__ for each in classes)) or "plain tensor"
            raise CheckpointError(f"{key} cannot be read as a {names}: {said(error)}") from error
        yield Piece(chunk.offsets, found)


def quantized_text(keys: Sequence[str]) -> str:
    return (
        f"{len(keys)} tensors, such as {keys[0]}, were dequantized and quantized again, which rounds their values: "
        "their blocks were saved in other shards. On the mesh and the number of ranks of the save they are loaded "
        "exactly."
    )


# -- memory


@torch.no_grad()
def fill_by_class(key: str, target: LocalShard, pieces: Iterable[Piece]) -> bool:
    """Copy ``pieces`` of the whole tensor to the shard ``target``. Return whether its class has changed values.

    Raises:
        CheckpointError: the class of the tensor ``key`` can neither be cut there nor copied to plain tensors.
    """
    local, boxes = local_part(target.value), list(target.extent.boxes())  # the result of detach may have other memory
    cuts = [(p, cut) for p in pieces for box in boxes if (cut := _common(box, p.offsets, p.tensor.shape)) is not None]
    if not cuts or _copied_by_class(local, cuts):
        return False
    values = torch.empty(local.shape, dtype=torch.promote_types(local.dtype, torch.float32))
    try:
        for piece, (here, there) in cuts:
            _cut(values, here).copy_(_cut(values_of(piece.tensor), there))
        values = values.to(local.device)
        local.copy_(values)
        return is_wrapper(local) and not torch.equal(values_of(local), values)
    except Exception as error:  # the class's own code
        raise CheckpointError(
            f"{key} cannot be cut like the shards here, nor copied as plain values ({said(error)}). Load it on the "
            "mesh that saved it, into tensors made alike."
        ) from error


_Spans = Sequence[tuple[int, int]]
"""The start and the size in each dim."""


def _common(box: Box, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[_Spans, _Spans] | None:
    """Return where a shard and a piece have the elements that are in ``box`` of the shard and in the piece, if any."""
    spans = list(zip(box.offsets, box.local_offsets, box.sizes, offsets, sizes, strict=True))
    starts = [max(at, begin) for at, _, _, begin, _ in spans]
    lengths = [min(at + n, begin + m) - s for (at, _, n, begin, m), s in zip(spans, starts, strict=True)]
    if any(length <= 0 for length in lengths):
        return None
    here = [(own + s - at, n) for (at, own, *_), s, n in zip(spans, starts, lengths, strict=True)]
    return here, [(s - begin, n) for (*_, begin, _), s, n in zip(spans, starts, lengths, strict=True)]


def _cut(tensor: torch.Tensor, spans: _Spans) -> torch.Tensor:
    for dim, (start, size) in enumerate(spans):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, size)
    return tensor


def _copied_by_class(local: torch.Tensor, cuts: Sequence[tuple[Piece, tuple[_Spans, _Spans]]]) -> bool:
    """Copy the inner tensors of all ``cuts``. Return False if the class cannot cut there, and some may be copied.

    Pieces may share an inner tensor of which each has other values, such as a scale of the tensor. So cuts are compared
    once all are copied, unless there is only one, of the whole shard.
    """
    addresses = storage_addresses(local)
    try:
        for piece, (here, there) in cuts:
            own, given = _cut(local, here), _cut(piece.tensor, there)
            # What is saved went through detach, which may change what the class says of itself, such as its dtype.
            if not _is_alike(own.detach(), given) or not storage_addresses(own) <= addresses:
                return False
            for mine, saved in zip(plain_tensors(own), plain_tensors(given), strict=True):
                mine.copy_(saved)
        if len(cuts) == 1 and cuts[0][0].tensor.shape == local.shape:
            return True
        return all(checksum(_cut(local, here)) == checksum(_cut(p.tensor, there)) for p, (here, there) in cuts)
    except Exception:  # the class's own code: any error means that it cannot be cut there
        return False


def _is_alike(one: Any, other: Any) -> bool:
    """Return whether both are of one class, with inner tensors of the same names, shapes and dtypes."""
    if type(one) is not type(other) or one.shape != other.shape or not is_wrapper(one):
        return type(one) is type(other) and (one.shape, one.dtype) == (other.shape, other.dtype)
    (names, context), flat = one.__tensor_flatten__(), other.__tensor_flatten__()
    return (names, context) == tuple(flat) and all(_is_alike(getattr(one, n), getattr(other, n)) for n in names)
