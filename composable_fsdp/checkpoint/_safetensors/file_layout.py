"""The layout of tensors in safetensors files, and of files in a Hugging Face checkpoint. Pure: touches no file.

A file is the length of its header in 8 bytes, the header in JSON, and the values of its tensors, one after the other
(https://huggingface.co/docs/safetensors, Format). If there are several files, an index in JSON maps tensors to files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

import torch

from composable_fsdp.errors import CheckpointError

__all__ = ["DTYPES", "INDEX", "SINGLE", "FileLayout", "TensorFiles", "TensorSpec", "dtype_code"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_CODES = {
    "BOOL": "bool",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
DTYPES: Mapping[str, torch.dtype] = {code: getattr(torch, name) for code, name in _CODES.items()}
"""Dtypes by their names in the format."""

_BY_DTYPE = {dtype: code for code, dtype in DTYPES.items()}
_ALIGNMENT = 8


def dtype_code(dtype: torch.dtype) -> str:
    """Return the format's name for ``dtype``.

    Raises:
        CheckpointError: the format has no such dtype.
    """
    if dtype not in _BY_DTYPE:
        raise CheckpointError(f"safetensors files cannot hold {dtype}. They hold {', '.join(map(str, _BY_DTYPE))}.")
    return _BY_DTYPE[dtype]


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
        ends = list(accumulate(spec.nbytes for spec in self.tensors))
        entries: dict[str, Any] = {"__metadata__": dict(self.metadata)}
        for spec, end in zip(self.tensors, ends, strict=True):
            offsets = [end - spec.nbytes, end]
            entries[spec.name] = {"dtype": dtype_code(spec.dtype), "shape": spec.shape, "data_offsets": offsets}
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    @cached_property
    def offsets(self) -> dict[str, int]:
        """The offset of each tensor's first byte in the file."""
        begins = accumulate((spec.nbytes for spec in self.tensors), initial=len(self.header))
        return {spec.name: begin for spec, begin in zip(self.tensors, begins, strict=False)}

    @property
    def nbytes(self) -> int:
        """The size of the file in bytes."""
        return len(self.header) + sum(spec.nbytes for spec in self.tensors)


@dataclass(frozen=True)
class TensorFiles:
    """All files of a checkpoint.

    Args:
        files: the layouts of the files. Each tensor is in one of them.
        aliases: other names of tensors, with the name under which the file has it.
        indexed: True if an index maps tensors to files. Otherwise there is one file, ``model.safetensors``.
    """

    files: tuple[FileLayout, ...]
    aliases: Mapping[str, str]
    indexed: bool

    @staticmethod
    def of(
        tensors: Iterable[TensorSpec], aliases: Mapping[str, str], max_file_bytes: int, generation: str = ""
    ) -> TensorFiles:
        """Assign ``tensors`` to files in their order, with at most ``max_file_bytes`` of tensors in each.

        A tensor larger than that has a file of its own.

        Args:
            generation: part of the names of several files, so that those of another save can be in the same directory.
        """
        groups = _split(tensors, max_file_bytes)
        prefix = f"model-{generation}-" if generation else "model-"
        names = [f"{prefix}{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
        indexed = len(groups) > 1
        files = [
            _file(name, group, aliases) for name, group in zip(names if indexed else [SINGLE], groups, strict=True)
        ]
        return TensorFiles(tuple(files), aliases, indexed)

    @property
    def index(self) -> bytes:
        """The content of the index. Aliases are in its metadata, which readers that do not know them ignore."""
        metadata: dict[str, Any] = {"total_size": sum(s.nbytes for f in self.files for s in f.tensors)}
        if self.aliases:
            metadata["aliases"] = dict(self.aliases)
        weight_map = {spec.name: file.name for file in self.files for spec in file.tensors}
        return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, ensure_ascii=False).encode()


def _split(tensors: Iterable[TensorSpec], max_file_bytes: int) -> list[list[TensorSpec]]:
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in tensors:
        if groups[-1] and size + spec.nbytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.nbytes
    return groups


def _file(name: str, tensors: Sequence[TensorSpec], aliases: Mapping[str, str]) -> FileLayout:
    """Order tensors by decreasing element size, so that all are aligned and readers can view them without a copy.

    Aliases are in the metadata, as ``safetensors.torch.save_model`` writes them; transformers requires ``format``.
    """
    held = {spec.name for spec in tensors}
    own = {alias: kept for alias, kept in aliases.items() if kept in held}
    aligned = sorted(tensors, key=lambda spec: -spec.dtype.itemsize)
    return FileLayout(name, tuple(aligned), {"format": "pt"} | own)
