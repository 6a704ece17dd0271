"""The metadata of a checkpoint, which ``torch.distributed.checkpoint`` writes as a pickle.

Torch unpickles any class in it, and so runs any code. Here the pickle is read into
plain values, of which torch's metadata is built: a stream calls nothing and changes no class, because no class is ever
on its stack. The unpickler of ``torch.load(weights_only=True)`` does not read the protocol of pickles in which DCP
writes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, ItemsView
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from composable_fsdp._files import open_regular, regular_file
from composable_fsdp.checkpoint._archive import Opcodes
from composable_fsdp.checkpoint._dcp.directory import METADATA, Manifest
from composable_fsdp.errors import CheckpointError

_MOST_BYTES_AT_ONCE = 1 << 20
"""The most bytes that one opcode may ask for. Python writes frames of about 64 KiB."""

_MOST, _MOST_DIMS, _MOST_PARTS, _MOST_LETTERS, _MOST_OF_NAME = 2**63 - 1, 64, 1000, 10_000, 100
"""The most that a number, the dims of a tensor, the dots of a key, which are looked at in pairs, the letters of a text
and those of the name of a class may be.
"""

_ADMITTED = b"".join(
    (
        *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.STACK_GLOBAL),
        *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
        *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
        *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.APPEND),
        *(pickle.APPENDS, pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    )
)
"""The opcodes that do only what Python's unpickler does. They make plain values."""

_MOST_COMPRESSION = 16
"""The values' bytes per byte that tensor classes of optimizer state may have: two bits for a value of fp32."""

_BYTES_OF_CHUNK = 8
"""A chunk takes more bytes of metadata. A stream that repeats one in fewer is refused."""

T = TypeVar("T")


def read_metadata(folder: Path, manifest: Manifest | None = None) -> Metadata:
    """Read DCP's metadata of the checkpoint ``folder``, without its ``storage_meta``.

    The chunks of a tensor have its number of elements. Each lies in a file of the folder, in as many bytes as its
    values need; all values together have no more bytes than the files. Sizes of files are those in ``manifest``, whose
    files have been checked, or else on the disk.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    path = folder / METADATA
    try:
        with _BoundedFile(open_regular(folder, METADATA)) as file:
            metadata = _metadata(_Values(file).load(), file.tell())
        _check_places(metadata, folder, {} if manifest is None else {n: r.bytes for n, r in manifest.files.items()})
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename or path} is missing.") from None
    except Exception as error:  # damaged bytes may raise anything
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}.") from error
    return metadata


# -- the pickle, as plain values


class _Object:
    """An object as its pickle describes it: the name of what would be called, its arguments, and the state."""

    __slots__ = ("arguments", "kind", "state")

    def __init__(self, kind: object, arguments: object) -> None:
        self.kind = kind
        self.arguments = arguments
        self.state: object = None


class _BoundedFile(io.BufferedReader):
    """A file of which an opcode gets a bounded number of bytes, however many it asks for."""

    def read(self, nbytes: int | None = -1, /) -> bytes:
        if nbytes is None or not 0 <= nbytes <= _MOST_BYTES_AT_ONCE:
            raise pickle.UnpicklingError(f"an opcode asks for {nbytes} bytes, of which {_MOST_BYTES_AT_ONCE} are read")
        return super().read(nbytes)


class _Values(pickle._Unpickler):
    """Reads plain values. A class or function is the text of its name, and calling one gives an ``_Object``.

    Mappings have keys of classes whose hash does not recurse: a tuple in a tuple and so on would overflow the stack.
    """

    stack: list[Any]
    metastack: list[list[Any]]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> str:
        return _text(f"{_text(module, _MOST_OF_NAME)}.{_text(name, _MOST_OF_NAME)}")

    def _call(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = _Object(self.stack[-1], arguments)

    def _build(self) -> None:
        state = self.stack.pop()
        built = self.stack[-1]
        if type(built) is not _Object:
            raise pickle.UnpicklingError(f"it sets attributes of a {type(built).__name__}")
        built.state = state

    def _set_items(self) -> None:
        items = self.pop_mark()
        target = self.stack[-1]
        if type(target) is not dict or not all(type(key) in (str, _Object) for key in items[::2]):
            raise pickle.UnpicklingError("it has a mapping whose keys are no names")
        target.update(zip(items[::2], items[1::2], strict=True))

    def _set_item(self) -> None:
        self.metastack.append(self.stack[:-2])
        self.stack = self.stack[-2:]
        self._set_items()

    dispatch = Opcodes({code: pickle._Unpickler.dispatch[code] for code in _ADMITTED})
    dispatch |= {pickle.REDUCE[0]: _call, pickle.NEWOBJ[0]: _call, pickle.BUILD[0]: _build}
    dispatch |= {pickle.SETITEM[0]: _set_item, pickle.SETITEMS[0]: _set_items}


# -- torch's classes


def _metadata(value: object, nbytes: int) -> Metadata:
    """Build the metadata that a stream of ``nbytes`` describes. They bound its work: few bytes can name many chunks."""
    fields = _fields(value, Metadata)
    planned = fields.get("planner_data")
    saved: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    keys = _dict(fields["state_dict_metadata"])
    unread = "optimizer.param_groups." if any(key == "optimizer.layouts" for key, _ in keys) else "\0"
    left = nbytes // _BYTES_OF_CHUNK
    for key, each in keys:
        if not _text(key).startswith(unread):  # for torch's functions, several in one place: layouts have them too
            saved[key], count = _stored(each, left)
            left -= count
    return Metadata(
        saved,
        planned and {key: _path(key, each) for key, each in _dict(planned) if key in saved},
        {_index(key): _place(each) for key, each in _dict(fields["storage_data"])},
    )


def _fields(value: object, kind: type) -> dict[Any, Any]:
    if type(value) is not _Object or value.kind != f"{kind.__module__}.{kind.__qualname__}":
        asked = value.kind if type(value) is _Object and type(value.kind) is str else type(value).__name__
        raise pickle.UnpicklingError(f"it has a {asked} where torch has a {kind.__name__}")
    return _of_type(value.state or {}, dict)


def _dict(value: object) -> ItemsView[Any, Any]:
    return _of_type(value, dict).items()


def _text(value: object, most: int = _MOST_LETTERS) -> str:
    text = _of_type(value, str)
    if len(text) > most:
        raise pickle.UnpicklingError(f"it has a text of {len(text)} letters, of which {most} are read")
    return text


def _of_type(value: object, kind: type[T]) -> T:
    if type(value) is not kind:
        raise pickle.UnpicklingError(f"it has a {type(value).__name__} where torch has a {kind.__name__}")
    return value


def _number(value: object) -> int:
    number = _of_type(value, int)
    if not 0 <= number <= _MOST:
        raise pickle.UnpicklingError("it has a size or an offset that is negative or of more than 64 bits")
    return number


def _size(value: object) -> torch.Size:
    if type(value) is _Object and value.kind == "torch.Size":
        (value,) = _of_type(value.arguments, tuple)
    size = torch.Size(map(_number, _of_type(value, tuple)[: _MOST_DIMS + 1]))
    if len(size) > _MOST_DIMS or prod(max(1, length) for length in size) > _MOST:  # strides count empty dims as 1
        raise pickle.UnpicklingError("it has a tensor that no memory can hold")
    return size


def _path(key: str, value: object) -> tuple[str | int, ...]:
    """Return the path of ``key``, which joins its parts. So paths have no more letters than their keys."""
    path = _of_type(value, tuple)
    _text(path[0] if path else None)
    if key.count(".") > _MOST_PARTS:
        raise pickle.UnpicklingError(f"it has a path of more than {_MOST_PARTS} parts")
    letters = sum(1 if type(part) is int else len(_text(part)) for part in path)
    if letters > len(key) or ".".join(map(str, path)) != key:
        raise pickle.UnpicklingError(f"{key[:100]} is not what joins its path")
    return path


def _stored(value: object, most: int) -> tuple[TensorStorageMetadata | BytesStorageMetadata, int]:
    """Return the metadata of one value, and the number of its chunks, which is at most ``most``."""
    if type(value) is _Object and value.kind == f"{BytesStorageMetadata.__module__}.{BytesStorageMetadata.__name__}":
        return BytesStorageMetadata(), 0
    fields = _fields(value, TensorStorageMetadata)
    size, listed = _size(fields["size"]), _of_type(fields["chunks"], list)
    if len(listed) > most:
        raise pickle.UnpicklingError("it repeats chunks")
    chunks: list[ChunkStorageMetadata] = []
    for each in listed:
        found = _fields(each, ChunkStorageMetadata)
        chunk = ChunkStorageMetadata(_size(found["offsets"]), _size(found["sizes"]))
        if not len(chunk.offsets) == len(chunk.sizes) == len(size) or any(
            at + length > whole for at, length, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
        ):
            raise pickle.UnpicklingError("a chunk lies outside its tensor")
        chunks.append(chunk)
    if sum(prod(chunk.sizes) for chunk in chunks) != prod(size):
        raise pickle.UnpicklingError("the chunks of a tensor do not have its number of elements")
    return TensorStorageMetadata(TensorProperties(_dtype(fields["properties"])), size, chunks), len(chunks)


def _dtype(value: object) -> torch.dtype:
    """Return the dtype in a tensor's properties. The others say how it was laid out in memory when it was saved."""
    if type(value) is _Object and value.kind == f"{TensorProperties.__module__}.{TensorProperties.__name__}":
        name = _text(_of_type(value.state, tuple)[0]).removeprefix("torch.")
        if type(dtype := vars(torch).get(name)) is torch.dtype:
            return dtype
    raise pickle.UnpicklingError("it has a tensor without a dtype that this version of torch knows")


def _index(value: object) -> MetadataIndex:
    fields = _fields(value, MetadataIndex)
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _text(fields["fqn"]), None if offset is None else _size(offset), None if index is None else _number(index)
    )


def _place(value: object) -> _StorageInfo:
    fields = _fields(value, _StorageInfo)
    if fields.get("transform_descriptors"):
        raise pickle.UnpicklingError("a value is compressed: torch.distributed.checkpoint.load reads it")
    return _StorageInfo(_text(fields["relative_path"]), _number(fields["offset"]), _number(fields["length"]))


def _check_places(metadata: Metadata, folder: Path, sizes: dict[str, int]) -> None:
    """Raise if a value has no place, or one outside the files of ``folder``, whose ``sizes`` are known by name.

    All values together have no more bytes than the files, or a small file would take long to read.
    """
    for place in metadata.storage_data.values():
        name = place.relative_path
        if name not in sizes:
            sizes[name] = regular_file(folder, name).stat().st_size
        if place.offset + place.length > sizes[name]:
            raise pickle.UnpicklingError(f"a value ends behind the end of {name}")
    used, known = 0, set[object]()
    for key, saved in metadata.state_dict_metadata.items():
        if isinstance(saved, TensorStorageMetadata):
            filled = [chunk for chunk in saved.chunks if prod(chunk.sizes)]
            places = [metadata.storage_data[MetadataIndex(key, chunk.offsets)] for chunk in filled]
            for chunk, place in zip(filled, places, strict=True):
                nbytes = prod(chunk.sizes) * saved.properties.dtype.itemsize
                if ".state." in key or f"classes.{key}" in metadata.state_dict_metadata:  # a tensor class may need less
                    nbytes //= _MOST_COMPRESSION
                if nbytes > place.length:
                    raise pickle.UnpicklingError(f"a chunk of {nbytes} bytes has {place.length} in its file")
            own = tuple((place.relative_path, place.offset) for place in places)
            if key.startswith("model.") and own in known:  # save writes tied weights once
                continue
            known.add(own)
        else:
            places = [metadata.storage_data[MetadataIndex(key)]]
        used += sum(place.length for place in places)
    if used > sum(sizes.values()):
        raise pickle.UnpicklingError("several values are in the same bytes of a file")
