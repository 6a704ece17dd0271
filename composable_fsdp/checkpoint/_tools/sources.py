"""Readers for checkpoints of any kind, block by block, without a model, a process group or a GPU.

The paths of tensors are those of :mod:`~composable_fsdp.checkpoint._dcp.contents` for every kind: ``("model", name)``,
or ``("optimizer", "state", name, key)``.
"""

from __future__ import annotations

import io
import mmap
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from composable_fsdp._layout.block import Box
from composable_fsdp.checkpoint._dcp import contents
from composable_fsdp.checkpoint._dcp.directory import MANIFEST, METADATA, candidates, find
from composable_fsdp.checkpoint._dcp.filesystem import read_metadata
from composable_fsdp.checkpoint._dcp.manifest import Manifest
from composable_fsdp.checkpoint._dcp.restore import read_objects
from composable_fsdp.checkpoint._safetensors.reader import Reader, StoredTensors
from composable_fsdp.checkpoint._tools.paths import canonical, flatten
from composable_fsdp.errors import CheckpointError

__all__ = [
    "DcpSource",
    "Kind",
    "SafetensorsSource",
    "Source",
    "Spec",
    "TorchSource",
    "archive_in",
    "kind_of",
    "open_source",
]

BLOCK_BYTES = 64 << 20
"""Maximum bytes of a mapped file that are read at once."""


class Kind(str, Enum):
    """The kind of a checkpoint. ``FOLDER`` is a folder of ``DCP`` checkpoints, as ``save`` creates it."""

    FOLDER = "folder"
    DCP = "dcp"
    TORCH = "torch"
    SAFETENSORS = "safetensors"


def kind_of(path: Path) -> Kind:
    """Return the kind of the checkpoint at ``path``.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    if path.is_dir():
        if (path / MANIFEST).is_file() or (path / METADATA).is_file():
            return Kind.DCP
        if candidates(path):
            return Kind.FOLDER
        if any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
            return Kind.SAFETENSORS
    elif path.name.endswith((".safetensors", ".safetensors.index.json")):
        return Kind.SAFETENSORS
    elif path.is_file():
        return Kind.TORCH
    find(path)  # raises if there is no checkpoint
    return Kind.DCP


def open_source(path: Path, *, weights_only: bool = True) -> Source:
    """Open the checkpoint at ``path``, or the newest one in the folder ``path``.

    Args:
        path: a checkpoint of any kind.
        weights_only: admit only the classes that ``torch.load(weights_only=True)`` admits.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    match kind_of(path):
        case Kind.SAFETENSORS:
            return SafetensorsSource(path)
        case Kind.TORCH:
            return TorchSource(path, weights_only=weights_only)
        case _:
            return DcpSource(find(path), weights_only=weights_only)


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a full tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def full_box(self) -> Box:
        """The full tensor as one block."""
        return Box((0,) * len(self.shape), (0,) * len(self.shape), self.shape)


class Source(Protocol):
    """A checkpoint that is open for reading.

    Attributes:
        path: path of the checkpoint.
        kind: kind of the checkpoint.
        tensors: shape and dtype by path. Tied tensors are listed once.
        aliases: further paths of tied tensors, with the path in ``tensors``.
        manifest: the manifest, if ``save`` or ``convert`` wrote the checkpoint.
    """

    @property
    def path(self) -> Path: ...
    @property
    def kind(self) -> Kind: ...
    @property
    def tensors(self) -> Mapping[contents.Path, Spec]: ...
    @property
    def aliases(self) -> Mapping[contents.Path, contents.Path]: ...
    @property
    def manifest(self) -> Manifest | None: ...
    @property
    def object_paths(self) -> Iterable[contents.Path]:
        """The paths of values that are not tensors."""

    def value(self, path: contents.Path) -> Any:
        """Return the value at ``path``, which is not a tensor.

        Raises:
            CheckpointError: the value has classes that are not admitted.
        """

    def boxes(self, path: contents.Path) -> Iterator[Box]:
        """Yield blocks that tile the tensor."""

    def read(self, path: contents.Path, box: Box, out: torch.Tensor) -> None:
        """Copy one of these blocks to ``out``, which has its shape and any dtype."""


class DcpSource:
    """A checkpoint directory of ``torch.distributed.checkpoint``, with or without our manifest."""

    kind = Kind.DCP

    def __init__(self, path: Path, *, weights_only: bool) -> None:
        self.path = path
        self.manifest = Manifest.read(path) if (path / MANIFEST).exists() else None
        self._metadata = read_metadata(path)
        self._weights_only = weights_only
        saved = self._metadata.state_dict_metadata
        self._keys = dict(zip(canonical([self._path(key) for key in saved]), saved, strict=True))
        self.tensors: dict[contents.Path, Spec] = {}
        self.aliases: dict[contents.Path, contents.Path] = {}
        positions: dict[object, contents.Path] = {}
        for at, key in self._keys.items():
            tensor = saved[key]
            if isinstance(tensor, TensorStorageMetadata):
                first = positions.setdefault(self._positions(key, tensor), at)
                if first != at:
                    self.aliases[at] = first
                else:
                    self.tensors[at] = Spec(tuple(tensor.size), tensor.properties.dtype)
        self.object_paths = [at for at in self._keys if at not in self.tensors and at not in self.aliases]

    def value(self, path: contents.Path) -> Any:
        key = self._keys[path]
        return read_objects(self.path, self._metadata, [key], weights_only=self._weights_only)[key]

    def boxes(self, path: contents.Path) -> Iterator[Box]:
        spec = self.tensors[path]
        for chunk in self._chunks(path):
            yield from chunk.pieces(spec.shape, BLOCK_BYTES // spec.dtype.itemsize)

    def read(self, path: contents.Path, box: Box, out: torch.Tensor) -> None:
        for chunk in self._chunks(path):
            inside = [o - c for o, c in zip(box.offsets, chunk.offsets, strict=True)]
            if all(o >= 0 and o + n <= m for o, n, m in zip(inside, box.sizes, chunk.sizes, strict=True)):
                item = self._metadata.storage_data[MetadataIndex(self._keys[path], torch.Size(chunk.offsets))]
                found = _mapped_item(self.path, item)
                out.copy_(found[tuple(slice(o, o + n) for o, n in zip(inside, box.sizes, strict=True))])
                return

    def _chunks(self, path: contents.Path) -> Iterator[Box]:
        saved = self._metadata.state_dict_metadata[self._keys[path]]
        assert isinstance(saved, TensorStorageMetadata)
        for chunk in saved.chunks:
            yield Box(tuple(chunk.offsets), (0,) * len(chunk.sizes), tuple(chunk.sizes))

    def _path(self, key: str) -> contents.Path:
        """Return the path that DCP recorded for ``key``. Without one, split ``key`` only after ``model.``."""
        noted = (self._metadata.planner_data or {}).get(key)
        if noted is not None:
            return tuple(noted)
        return tuple(key.split(".", 1)) if key.startswith("model.") else (key,)

    def _positions(self, key: str, tensor: TensorStorageMetadata) -> object:
        """Return the file positions of a tensor. They are equal for all names of a tensor that was written once."""
        stored = self._metadata.storage_data
        infos = [stored[MetadataIndex(key, chunk.offsets)] for chunk in tensor.chunks]
        return tuple((info.relative_path, info.offset) for info in infos)


class TorchSource:
    """A memory-mapped ``torch.save`` file of a state dict, or of ``{"model": state dict, "optimizer": …, …}``."""

    kind = Kind.TORCH
    manifest = None

    def __init__(self, path: Path, *, weights_only: bool) -> None:
        self.path = path
        values = dict(flatten(_load(path, weights_only)))
        values = dict(zip(canonical(list(values)), values.values(), strict=True))
        self._tensors = {at: _checked(at, value) for at, value in values.items() if isinstance(value, torch.Tensor)}
        self._objects = {at: value for at, value in values.items() if at not in self._tensors}
        self.object_paths = list(self._objects)
        self.tensors: dict[contents.Path, Spec] = {}
        self.aliases: dict[contents.Path, contents.Path] = {}
        first: dict[object, contents.Path] = {}
        for at, tensor in self._tensors.items():
            same = (at[0], tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if tensor.numel() and first.setdefault(same, at) != at:
                self.aliases[at] = first[same]
            else:
                self.tensors[at] = Spec(tuple(tensor.shape), tensor.dtype)

    def value(self, path: contents.Path) -> Any:
        return self._objects[path]

    def boxes(self, path: contents.Path) -> Iterator[Box]:
        return _mapped_boxes(self.tensors[path])

    def read(self, path: contents.Path, box: Box, out: torch.Tensor) -> None:
        out.copy_(self._tensors[path][box.slices])


class SafetensorsSource:
    """A model in one safetensors file, or in several with an index."""

    kind = Kind.SAFETENSORS
    manifest = None
    object_paths: tuple[contents.Path, ...] = ()

    def __init__(self, path: Path) -> None:
        self._stored = stored = StoredTensors.at(path)
        self._reader = Reader(stored)
        self.path = path
        self.tensors: dict[contents.Path, Spec] = {}
        for name, found in stored.tensors.items():
            if found.dtype is None:
                raise CheckpointError(f"{found.file}: {name} has the dtype {found.code}, which torch does not have.")
            self.tensors["model", name] = Spec(found.shape, found.dtype)
        self.aliases: dict[contents.Path, contents.Path] = {
            ("model", a): ("model", name) for a, name in stored.aliases.items()
        }

    def value(self, path: contents.Path) -> Any:
        raise KeyError(path)

    def boxes(self, path: contents.Path) -> Iterator[Box]:
        return _mapped_boxes(self.tensors[path])

    def read(self, path: contents.Path, box: Box, out: torch.Tensor) -> None:
        for piece, values in self._reader.blocks(path[1], [box]):
            at = (slice(o - b, o - b + n) for o, b, n in zip(piece.offsets, box.offsets, piece.sizes, strict=True))
            out[tuple(at)].copy_(values)


def _mapped_boxes(spec: Spec) -> Iterator[Box]:
    return spec.full_box.pieces(spec.shape, BLOCK_BYTES // spec.dtype.itemsize)


def _load(path: Path, weights_only: bool) -> Mapping[Any, Any]:
    """Load the mapping in a ``torch.save`` file.

    Raises:
        CheckpointError: the file has no mapping, or has classes that are not admitted.
    """
    try:
        value = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is damaged, no checkpoint, or has objects of classes that torch.load(weights_only=True) does not "
            f"admit: {str(error).splitlines()[0]}. If you trust whoever wrote it, admit them all (--trust), which can "
            "run any code in it."
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged, or no checkpoint: {str(error).splitlines()[0]}") from error
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{path} has a {type(value).__name__} instead of a state dict.")
    return value


def _checked(path: contents.Path, tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(
            f"{'.'.join(path)} is a {type(tensor).__name__} of layout {tensor.layout}: only plain tensors can be read, "
            "unsharded ones (Full())."
        )
    return tensor.detach()


# -- single items in DCP's files: archives in the format of torch.save


class _Window(io.RawIOBase):
    """A read-only view of ``length`` bytes of ``file`` from ``offset`` on."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file = file
        self._offset = offset
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        self._file.seek(self._offset + self._at)
        data = self._file.read(len(view))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


def archive_in(file: IO[bytes], offset: int, length: int) -> IO[bytes]:
    """Return the archive of one item in ``file`` as a file object."""
    return io.BufferedReader(_Window(file, offset, length))


def _mapped_item(folder: Path, item: _StorageInfo) -> torch.Tensor:
    """Return the tensor ``item`` as a view of the memory-mapped file.

    DCP's own reader copies, and copying many large tensors in turn makes the heap grow beyond the memory in use.

    Raises:
        CheckpointError: the item was written with an extension of DCP, such as compression.
    """
    path = folder / item.relative_path
    if item.transform_descriptors:
        raise CheckpointError(
            f"{path} was written with {', '.join(item.transform_descriptors)}, which is not read here."
        )
    with path.open("rb") as file:
        with FakeTensorMode():  # reads the positions of the elements only
            described = torch.load(archive_in(file, item.offset, item.length), map_location="cpu", weights_only=True)
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    storage = described.untyped_storage()
    if not storage.nbytes():
        return torch.empty(described.shape, dtype=described.dtype)
    begin = item.offset + storage._checkpoint_offset
    elements = torch.frombuffer(memory, dtype=torch.uint8, count=storage.nbytes(), offset=begin).view(described.dtype)
    return elements.as_strided(described.shape, described.stride(), described.storage_offset())
