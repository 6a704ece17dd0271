"""``load_safetensors``: loads Hugging Face checkpoints directly into shards."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from composable_fsdp._api.extents import Box
from composable_fsdp._consistency.rank_report import ranks_text
from composable_fsdp.checkpoint._coordination.mismatch import (
    Mismatch,
    differ,
    dtype_name,
    leave_common_unexpected,
    refuse,
    tensor_text,
)
from composable_fsdp.checkpoint._coordination.rank_group import TIMEOUT, meet
from composable_fsdp.checkpoint._state_dict.loader import digest
from composable_fsdp.checkpoint._state_dict.tensors import LocalShard, prepare_for_access, tensors_of
from composable_fsdp.errors import CheckpointError, ConfigurationError

__all__ = [
    "DTYPES",
    "INDEX",
    "SINGLE",
    "KeyMap",
    "KeyedTensor",
    "Reader",
    "StoredTensors",
    "keyed_tensors",
    "load_safetensors",
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

KeyMap = Callable[[str], str] | Mapping[str, str]
"""Maps names in the model to names in the files. Names that a mapping lacks are the same in both."""


def load_safetensors(
    model: nn.Module,
    path_or_index: str | os.PathLike[str],
    *,
    key_map: KeyMap | None = None,
    strict: bool = True,
    convert_dtype: bool = False,
    timeout: float = TIMEOUT,
) -> _IncompatibleKeys:
    """Load the parameters and persistent buffers of ``model`` from safetensors files.

    All ranks of the default process group must call it, also those with another part of the model, such as pipeline
    stages. Each rank reads only the elements of its shards, and copies them from the mapped file to their destination.
    This takes about 32 MB of extra memory.

    Everything is checked on all ranks before anything is written, so after an error the model is unchanged. The
    exception is a file that can be opened but not read: the error then says that the model is loaded in part. Files
    have no checksums: corrupted bytes within a tensor are not detected.

    Args:
        model: a module in memory, sharded or not. After ``fully_shard`` on the meta device call
            :func:`composable_fsdp.to_empty` first. Every rank reads plain tensors in full.
        path_or_index: a ``.safetensors`` file, the ``.safetensors.index.json`` of several, or a directory with either,
            as ``save_pretrained`` and :func:`save_safetensors` write it.
        key_map: maps a name in the model to the name in the files, for files made for another implementation of the
            model: ``lambda name: f"model.{name}"`` or ``{"head.weight": "lm_head.weight"}``. Names that a mapping lacks
            are the same in both. Names in the model are without the prefixes of wrappers, as in
            ``composable_fsdp.checkpoint.state_dict``.
        strict: a tensor that is only in the model, or in the files and in no rank's model, is an error. So are tied
            parameters that the files have under several names with different values; without ``strict`` the first name
            counts.
        convert_dtype: allow files to have other dtypes than the model, which keeps its own, for example to train fp32
            parameters from a bf16 checkpoint. Without it, dtypes must be equal. Complex values never fit a real dtype,
            nor floating-point values an integer dtype.
        timeout: seconds for which ranks wait for each other, at the start and at every exchange.

    Returns:
        ``missing_keys``, which only this rank's model has, and ``unexpected_keys``, which no rank's model has, as
        ``nn.Module.load_state_dict`` does. For tied parameters one name in the files is enough; if there is none, only
        the first one is missing. Extra state is not loaded, and not missing.

    Raises:
        CheckpointError: a file is missing or damaged, the model does not fit, ranks see different files, a rank did not
            call in time, or an earlier asynchronous save failed. The error is the same on all ranks.
    """
    what = "load_safetensors"
    ranks = meet(what, timeout)
    load = _Load(Path(path_or_index))
    unexpected = ranks.combine(
        what,
        lambda: load.match(model, key_map, strict=strict, convert_dtype=convert_dtype),
        lambda fits: _verify_fits(fits, type(model).__name__, strict=strict),
    )
    ranks.agree(what, load.read)
    return _IncompatibleKeys(list(load.mismatch.missing), unexpected)


_Fit = tuple[Mismatch, Path, str]
"""Findings of one rank: the differences, the file or index, and a digest that is equal if ranks see the same files."""


class _Load:
    """One call of :func:`load_safetensors`, on one rank. ``_jobs`` are the shards to fill, with their keys."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._jobs: list[tuple[LocalShard, str]] = []
        self.mismatch = Mismatch()

    def match(self, model: nn.Module, key_map: KeyMap | None, *, strict: bool, convert_dtype: bool) -> _Fit:
        stored, mismatch, used = StoredTensors.at(self._path), self.mismatch, set[str]()
        self._stored = stored
        tensors = keyed_tensors(model, key_map)[0]
        for tensor in tensors:
            found = _keys_of(tensor, stored)
            used |= set(found)
            if not found:
                name, text = tensor.names[0], tensor_text(tensor.part.value.dtype, tensor.part.shape)
                mismatch.missing[name] = text + _key_note(name, tensor.keys[0])
                continue
            self._jobs.append((tensor.part, next(iter(found))))
            for key, name in list(found.items())[: None if strict else 1]:
                _compare(name, tensor.part, key, stored.tensors[key], convert_dtype, mismatch)
        unused = {key: each for key, each in stored.tensors.items() if key not in used}
        mismatch.unexpected = {key: f"{_dtype_of(each)} {each.shape}" for key, each in unused.items()}
        if strict and not mismatch.shapes and not mismatch.dtypes:
            mismatch.others = [text for tensor in tensors for text in _check_ties(tensor, stored)]
        return mismatch, stored.path, digest(sorted((n, each.code, each.shape) for n, each in stored.tensors.items()))

    @torch.no_grad()
    def read(self) -> None:
        reader = Reader(self._stored)
        for part, key in sorted(
            self._jobs, key=lambda job: self._stored.tensors[job[1]].file
        ):  # one file after another
            self._read_part(reader, part, key)

    def _read_part(self, reader: Reader, part: LocalShard, key: str) -> None:
        try:
            with part.plain(write=True) as local:
                for box, values in reader.blocks(key, part.extent.boxes()):
                    box.of_part(local).copy_(values)
        except Exception as error:
            raise CheckpointError(
                f"{self._stored.tensors[key].file} could not be read at {key!r}: {error}. The model is loaded in part."
            ) from error


def _verify_fits(fits: list[_Fit], model: str, *, strict: bool) -> list[str]:
    """Return the keys that no rank expects. Raise if anything does not fit."""
    mismatches = {rank: mismatch for rank, (mismatch, _, _) in enumerate(fits)}
    leave_common_unexpected(mismatches.values())
    path = fits[0][1]
    refuse(f"{path} does not fit {model}", mismatches, ignore=() if strict else ("missing", "unexpected"))
    others = [rank for rank, (_, _, seen) in enumerate(fits) if seen != fits[0][2]]
    if others:  # a path may be another directory on another host
        raise CheckpointError(
            f"{path} is not the same checkpoint on all ranks: {ranks_text(others)} found other tensors than rank 0. "
            "Put it on storage that all ranks share, or the same copy on every host."
        )
    return list(mismatches[0].unexpected)


def _keys_of(tensor: KeyedTensor, stored: StoredTensors) -> dict[str, str]:
    """Return the keys of ``tensor`` in the files, with its names. A tensor tied only in the model has several."""
    found: dict[str, str] = {}
    for name, wanted in zip(tensor.names, tensor.keys, strict=True):
        if (key := stored.key(wanted)) is not None:
            found.setdefault(key, name)
    return found


def _compare(
    name: str, part: LocalShard, key: str, stored: StoredTensor, convert_dtype: bool, mismatch: Mismatch
) -> None:
    """Add to ``mismatch`` why ``stored`` cannot be loaded into ``part``."""
    dtype, note = part.value.dtype, _key_note(name, key)
    fits = stored.dtype is not None and torch.can_cast(stored.dtype, dtype)
    if stored.shape != part.shape:
        mismatch.shapes[name] = differ(stored.shape, part.shape) + note
    elif not fits or (stored.dtype != dtype and not convert_dtype):
        advice = " (convert_dtype=True converts it)" if fits else ""
        mismatch.dtypes[name] = differ(_dtype_of(stored), dtype_name(dtype)) + note + advice


def _check_ties(tensor: KeyedTensor, stored: StoredTensors) -> Iterator[str]:
    """Yield an error text for each key whose values differ from those of the first key, in this rank's shard."""
    first, *others = list(_keys_of(tensor, stored)) or [""]
    for other in others:
        pairs = zip(*(Reader(stored).blocks(key, tensor.part.extent.boxes()) for key in (first, other)), strict=True)
        if not all(_same_bits(one, two) for (_, one), (_, two) in pairs):
            yield f"tied in the model, but with different values in the files: {first} and {other}"


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = (t.reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(one, other)


def _key_note(name: str, key: str) -> str:
    return "" if name == key else f" (in the files {key})"


def _dtype_of(stored: StoredTensor) -> str:
    return stored.code if stored.dtype is None else dtype_name(stored.dtype)


# -- the model's tensors


@dataclass(frozen=True)
class KeyedTensor:
    """This rank's shard of a tensor, all names of the tensor in the model, and its keys in the files in that order."""

    part: LocalShard
    names: list[str]
    keys: list[str]


def keyed_tensors(model: nn.Module, key_map: KeyMap | None) -> tuple[list[KeyedTensor], list[str]]:
    """Prepare ``model`` for access, and return its parameters and persistent buffers, and names of its extra state."""
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


# -- files


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
        """Read the headers at ``path``: a ``.safetensors`` file, an index, or a directory with either."""
        main = _main_file(path)
        wanted = _read_index(main) if main.suffix == ".json" else {main: None}
        tensors: dict[str, StoredTensor] = {}
        aliases: dict[str, str] = {}
        for file, names in wanted.items():
            content = opened(file)
            held = sorted(content.keys())
            absent = sorted(set(names or ()) - set(held))
            if absent:
                raise CheckpointError(f"{file} lacks tensors that the index says it has: {', '.join(absent)}")
            for name in held if names is None else names:
                view = content.get_slice(name)
                tensors[name] = StoredTensor(file, view.get_dtype(), tuple(view.get_shape()))
            aliases |= content.metadata() or {}
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
        if path != self._path or self._touched + nbytes > WINDOW_BYTES:
            self._path, self._file, self._touched = path, opened(path), 0
        self._touched += nbytes
        return self._file


def opened(path: Path) -> Any:
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


def _read_index(path: Path) -> dict[Path, list[str] | None]:
    """Return the names of the tensors in each file."""
    names: dict[Path, Any] = {}
    try:
        for name, file in json.loads(path.read_bytes())["weight_map"].items():
            names.setdefault(path.parent / file, []).append(name)
        return names
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
