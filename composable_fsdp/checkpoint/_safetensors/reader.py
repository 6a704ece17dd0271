"""The contents of safetensors files: headers, and values block by block."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from composable_fsdp._layout.block import Box
from composable_fsdp.checkpoint._safetensors.file_layout import DTYPES, INDEX, SINGLE
from composable_fsdp.errors import CheckpointError

__all__ = ["Reader", "StoredTensor", "StoredTensors"]

_PART = re.compile(r".+-\d{5}-of-\d{5}\.safetensors")

WINDOW_BYTES = 16 << 20
"""Bytes of a mapped file to read before it is mapped again. At most two such windows are in memory at once."""


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
    """The tensors of a checkpoint, read from its headers. Headers have the tensors' ends, so truncation is detected."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    """Names that are in no file, with the names of their tensors."""

    @staticmethod
    def at(path: Path) -> StoredTensors:
        """Read the headers at ``path``: a ``.safetensors`` file, an index, or a directory with either.

        Raises:
            CheckpointError: there is no checkpoint, or a file is missing or damaged. The text names it.
        """
        main = _main_file(path)
        tensors: dict[str, StoredTensor] = {}
        aliases: dict[str, str] = {}
        if main.suffix != ".json":
            _add(main, None, tensors, aliases)
        else:
            index = _read_index(main)
            aliases |= index["metadata"].get("aliases", {})
            by_file: dict[str, list[str]] = {}
            for name, file in index["weight_map"].items():
                by_file.setdefault(file, []).append(name)
            for file, names in by_file.items():
                _add(main.parent / file, names, tensors, aliases)
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
        for box in boxes:
            for piece in box.pieces(found.shape, WINDOW_BYTES // itemsize):
                file = self._open(found.file, _span(piece, found.shape) * itemsize)
                yield piece, file.get_slice(key)[piece.slices]

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


def _add(path: Path, names: Iterable[str] | None, tensors: dict[str, StoredTensor], aliases: dict[str, str]) -> None:
    """Add the tensors called ``names`` in the file at ``path``, or all, and the aliases in its metadata."""
    file = opened(path)
    held = set(file.keys())
    absent = [] if names is None else [name for name in names if name not in held]
    if absent:
        raise CheckpointError(f"{path} lacks tensors that the index says it has: {', '.join(sorted(absent))}")
    for name in sorted(held) if names is None else names:
        view = file.get_slice(name)
        tensors[name] = StoredTensor(path, view.get_dtype(), tuple(view.get_shape()))
    aliases |= file.metadata() or {}


def _span(box: Box, shape: tuple[int, ...]) -> int:
    """Return the number of elements of the full tensor from the first of ``box`` to its last."""
    span, stride = 1, 1
    for size, length in zip(reversed(box.sizes), reversed(shape), strict=True):
        span += (size - 1) * stride
        stride *= length
    return span


def _read_index(path: Path) -> dict[str, Any]:
    try:
        index = json.loads(path.read_bytes())
        weight_map, metadata = index["weight_map"], index.get("metadata") or {}
        if not all(isinstance(file, str) for file in weight_map.values()):
            raise TypeError("a file in the weight_map is no string")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged, or no safetensors index: {error!r}") from error
    return {"weight_map": weight_map, "metadata": metadata}


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
