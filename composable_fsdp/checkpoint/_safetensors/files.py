"""The tensors in safetensors files, and the files of a Hugging Face checkpoint.

A file is the length of its header in 8 bytes, the header in JSON, and the values of its tensors, one after the other
(https://huggingface.co/docs/safetensors, Format). If there are several files, an index in JSON maps tensors to files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composable_fsdp._layout.block import Box
from composable_fsdp.checkpoint._state_dict.names import prepare_for_access, tensors_of
from composable_fsdp.checkpoint._state_dict.shard_view import LocalShard
from composable_fsdp.errors import CheckpointError, ConfigurationError

__all__ = [
    "DTYPES",
    "INDEX",
    "SINGLE",
    "FileLayout",
    "KeyMap",
    "KeyedTensor",
    "Reader",
    "StoredTensor",
    "StoredTensors",
    "TensorFiles",
    "TensorSpec",
    "dtype_code",
    "keyed_tensors",
    "opened",
]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PART = re.compile(r".+-\d{5}-of-\d{5}\.safetensors")

WINDOW_BYTES = 16 << 20
"""Bytes of a mapped file to read before it is mapped again. At most two such windows are in memory at once."""

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    **{f"U{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
}
"""Dtypes by their names in the format."""


def dtype_code(dtype: torch.dtype) -> str:
    for code, known in DTYPES.items():
        if known == dtype:
            return code
    raise CheckpointError(f"safetensors files cannot hold {dtype}. They hold {', '.join(map(str, DTYPES.values()))}.")


# -- the model's tensors by their names in the files

KeyMap = Callable[[str], str] | Mapping[str, str]
"""Maps names in the model to names in the files. Names that a mapping lacks are the same in both."""


@dataclass(frozen=True)
class KeyedTensor:
    """This rank's shard of a tensor, all names of the tensor in the model, and its keys in the files in that order."""

    part: LocalShard
    names: list[str]
    keys: list[str]


def keyed_tensors(model: nn.Module, key_map: KeyMap | None) -> tuple[list[KeyedTensor], list[str]]:
    """Prepare ``model`` for access, and return its parameters and persistent buffers, and the names of its extra state.

    Raises:
        CheckpointError: tensors are on the meta device. The text names them.
        ConfigurationError: ``key_map`` is neither a mapping nor a callable.
    """
    mapping = {} if key_map is None else key_map
    if not isinstance(mapping, Mapping) and not callable(mapping):
        raise ConfigurationError(f"key_map must be a mapping or a callable of names, not {type(key_map).__name__}.")
    prepare_for_access(model)
    tensors, others = tensors_of(model)
    found = []
    for entries in tensors:
        names = [entry.name for entry in entries]
        keys = [mapping.get(name, name) if isinstance(mapping, Mapping) else mapping(name) for name in names]
        found.append(KeyedTensor(LocalShard(entries[0].value, entries[0].sharding), names, keys))
    return found, [entry.name for entry in others]


# -- files to write


@dataclass(frozen=True)
class TensorSpec:
    """The name, dtype and shape of a tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileLayout:
    """The layout of one file.

    Invariant: tensors are contiguous, and each begins at a multiple of its element size.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    metadata: Mapping[str, str]

    @cached_property
    def header(self) -> bytes:
        """The bytes before the first tensor."""
        ends = accumulate(spec.nbytes for spec in self.tensors)
        entries: dict[str, Any] = {"__metadata__": dict(self.metadata)}
        for spec, end in zip(self.tensors, ends, strict=True):
            offsets = [end - spec.nbytes, end]
            entries[spec.name] = {"dtype": dtype_code(spec.dtype), "shape": spec.shape, "data_offsets": offsets}
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @cached_property
    def offsets(self) -> dict[str, int]:
        """The offset of each tensor's first byte in the file."""
        begins = accumulate((spec.nbytes for spec in self.tensors), initial=len(self.header))
        return {spec.name: begin for spec, begin in zip(self.tensors, begins, strict=False)}

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(spec.nbytes for spec in self.tensors)


@dataclass(frozen=True)
class TensorFiles:
    """All files of a checkpoint. ``aliases`` are other names of tensors, with the name under which a file has them."""

    files: tuple[FileLayout, ...]
    aliases: Mapping[str, str]

    @staticmethod
    def of(
        tensors: Iterable[TensorSpec], aliases: Mapping[str, str], max_file_bytes: int, generation: str = ""
    ) -> TensorFiles:
        """Assign ``tensors`` to files in their order, with at most ``max_file_bytes`` of tensors in each.

        A tensor larger than that has a file of its own. ``generation`` is part of the names of several files, so that
        those of another save can be in the same directory.
        """
        groups: list[list[TensorSpec]] = [[]]
        size = 0
        for spec in tensors:
            if groups[-1] and size + spec.nbytes > max_file_bytes:
                groups.append([])
                size = 0
            groups[-1].append(spec)
            size += spec.nbytes
        prefix = f"model-{generation}-" if generation else "model-"
        names = [f"{prefix}{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
        if len(groups) == 1:
            names = [SINGLE]
        return TensorFiles(tuple(_file(n, group, aliases) for n, group in zip(names, groups, strict=True)), aliases)

    @property
    def indexed(self) -> bool:
        return len(self.files) > 1

    @property
    def index(self) -> bytes:
        """The content of the index. Aliases are in its metadata, which readers that do not know them ignore."""
        metadata: dict[str, Any] = {"total_size": sum(s.nbytes for f in self.files for s in f.tensors)}
        if self.aliases:
            metadata["aliases"] = dict(self.aliases)
        weight_map = {spec.name: file.name for file in self.files for spec in file.tensors}
        return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, ensure_ascii=False).encode()


def _file(name: str, tensors: Sequence[TensorSpec], aliases: Mapping[str, str]) -> FileLayout:
    """Order tensors by decreasing element size, so that all are aligned and readers can view them without a copy.

    Aliases are in the metadata, as ``safetensors.torch.save_model`` writes them; transformers requires ``format``.
    """
    held = {spec.name for spec in tensors}
    own = {alias: kept for alias, kept in aliases.items() if kept in held}
    return FileLayout(name, tuple(sorted(tensors, key=lambda spec: -spec.dtype.itemsize)), {"format": "pt"} | own)


# -- files to read


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: the file, the format's name for its dtype, and its shape."""

    file: Path
    code: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype, or ``None`` if torch has no such dtype."""
        return DTYPES.get(self.code)


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of a checkpoint, read from its headers. Headers have the tensors' ends, so truncation is detected.

    ``aliases`` are names that are in no file, with the names of their tensors.
    """

    path: Path
    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]

    @staticmethod
    def at(path: Path) -> StoredTensors:
        """Read the headers at ``path``: a ``.safetensors`` file, an index, or a directory with either.

        Raises:
            CheckpointError: there is no checkpoint, or a file is missing or damaged. The text names it.
        """
        main = _main_file(path)
        wanted, aliases = _read_index(main) if main.suffix == ".json" else ({main: None}, {})
        tensors: dict[str, StoredTensor] = {}
        for file, names in wanted.items():
            content = opened(file)
            held = sorted(content.keys())
            absent = sorted(set(names or ()) - set(held))
            if absent:
                raise CheckpointError(f"{file} lacks tensors that the index says it has: {', '.join(absent)}")
            for name in held if names is None else names:
                view = content.get_slice(name)
                tensors[name] = StoredTensor(file, view.get_dtype(), tuple(view.get_shape()))
            aliases = {**aliases, **(content.metadata() or {})}
        known = {alias: name for alias, name in aliases.items() if name in tensors and alias not in tensors}
        return StoredTensors(main, tensors, known)

    def key(self, name: str) -> str | None:
        """Return the key of the tensor called ``name`` in the files, or ``None`` if there is none."""
        return name if name in self.tensors else self.aliases.get(name)


@dataclass
class Reader:
    """Reads tensors block by block, with one file open at a time.

    The safetensors library maps files, and pages that were read count as memory of the process until they are unmapped.
    A file is therefore opened again after every ``WINDOW_BYTES``.
    """

    stored: StoredTensors
    _path: Path | None = None
    _file: Any = None
    _touched: int = 0

    def blocks(self, key: str, boxes: Iterable[Box]) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield the values in ``boxes`` in pieces. Each is a view of the file; drop it before taking the next one."""
        found = self.stored.tensors[key]
        itemsize = DTYPES[found.code].itemsize
        strides = [prod(found.shape[dim + 1 :]) for dim in range(len(found.shape))]
        for box in boxes:
            for piece in box.pieces(found.shape, WINDOW_BYTES // itemsize):
                span = 1 + sum((size - 1) * stride for size, stride in zip(piece.sizes, strides, strict=True))
                yield piece, self._open(found.file, span * itemsize).get_slice(key)[piece.slices]

    def _open(self, path: Path, nbytes: int) -> Any:
        """Return the file, to read a block that spans ``nbytes`` of it."""
        if path != self._path or self._touched + nbytes > WINDOW_BYTES:
            self._path, self._file, self._touched = path, opened(path), 0
        self._touched += nbytes
        return self._file


def opened(path: Path) -> Any:
    """Open a file with the safetensors library.

    Raises:
        CheckpointError: the file is missing or damaged, or the library is not installed.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise CheckpointError(
            f"{path} cannot be read without the safetensors library: pip install 'composable-fsdp[checkpoint]'"
        ) from error
    if not path.is_file():
        raise CheckpointError(f"{path} is missing.")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged, or no safetensors file: {error}") from error


def _read_index(path: Path) -> tuple[dict[Path, list[str] | None], dict[str, str]]:
    """Return the names of the tensors in each file, and the aliases."""
    names: dict[Path, Any] = {}
    try:
        index = json.loads(path.read_bytes())
        for name, file in index["weight_map"].items():
            names.setdefault(path.parent / file, []).append(name)
        return names, (index.get("metadata") or {}).get("aliases", {})
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged, or no safetensors index: {error!r}") from error


def _main_file(path: Path) -> Path:
    """Return the file or index to open for ``path``. As with Hugging Face, a single file has priority over an index."""
    if not path.is_dir():
        return path
    for name in (SINGLE, INDEX):
        if (path / name).is_file():
            return path / name
    indexes, files = sorted(path.glob("*.safetensors.index.json")), sorted(path.glob("*.safetensors"))
    found = indexes or [file for file in files if not _PART.fullmatch(file.name)]
    if len(found) == 1:
        return found[0]
    which = f"several: {', '.join(p.name for p in found)}. Pass the path of one" if found else "none"
    if files and not found:
        which = f"only parts of one, such as {files[0].name}, without the index"
    raise CheckpointError(f"{path} should have one safetensors file or index, but has {which}.")
