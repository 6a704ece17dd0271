"""``save_safetensors``: writes shards directly to Hugging Face checkpoints, without gathering tensors.

Headers are built from shapes and dtypes alone, rank 0 reserves the files, and every rank writes its shards at their
offsets. Ranks exchange no tensors, write concurrently, and need memory for one block. All ranks must share a file
system, which is checked before anything is written.

A file is the length of its header in 8 bytes, the header in JSON, and the values of its tensors, one after the other
(https://huggingface.co/docs/safetensors, Format). If there are several files, an index in JSON maps tensors to files.

The new checkpoint replaces the old one atomically: at every moment the directory has the complete old or new one.
Readers take ``model.safetensors``, or else the files that the index names. New files therefore get names that the old
ones do not have. One operation switches from the old checkpoint to the new: the rename of the file or index that
readers open, or the removal of ``model.safetensors`` if an index replaces it. Old files are deleted after it. Until all
files are complete and on disk, they are in a hidden directory that readers ignore.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composable_fsdp._api.extents import ShardExtent
from composable_fsdp._consistency.rank_report import ranks_text
from composable_fsdp.checkpoint._coordination.mismatch import check_arguments
from composable_fsdp.checkpoint._coordination.rank_group import TIMEOUT, meet
from composable_fsdp.checkpoint._safetensors.load_safetensors import (
    DTYPES,
    INDEX,
    SINGLE,
    KeyedTensor,
    KeyMap,
    keyed_tensors,
)
from composable_fsdp.checkpoint._state_dict.tensors import LocalShard
from composable_fsdp.errors import CheckpointError, ConfigurationError

__all__ = ["FileLayout", "Replacement", "TensorSpec", "dtype_code", "save_safetensors", "sync"]

BLOCK_BYTES = 16 << 20
"""The most bytes of a file that one block spans: the size of the copy that a rank may need."""


def save_safetensors(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_file_bytes: int = 5 * 10**9,
    dtype: torch.dtype | None = None,
    key_map: KeyMap | None = None,
    timeout: float = TIMEOUT,
) -> None:
    """Write the parameters and persistent buffers of ``model`` as safetensors files.

    All ranks of the default process group must call it. The files contain the tensors of all ranks: a tensor that
    differs between ranks must be a DTensor, or have different names, as in pipeline stages.

    The directory ``path`` is created if needed. It then has ``model.safetensors``, or several files with
    ``model.safetensors.index.json``, as ``save_pretrained`` of transformers writes them. Other files in it, such as
    ``config.json``, are kept. An existing checkpoint is replaced only when the new one is complete and on disk: if a
    save is interrupted, even by a kill, readers find one of the two, complete. Files have no checksums;
    :func:`composable_fsdp.checkpoint.save` makes checkpoints that do.

    Every rank writes its own shards block by block, with about 32 MB of extra memory; of replicas one writes. Tied
    parameters are written once, under the first of their names. The other names are in the metadata, where
    :func:`load_safetensors` finds them; transformers ties parameters itself. Extra state of modules is left out, with a
    warning.

    Args:
        model: a module, sharded or not. For plain tensors the values of the first rank that has them are written.
        path: a directory on storage that all ranks share.
        max_file_bytes: the most bytes of tensors in one file. A larger tensor has a file of its own.
        dtype: the dtype to write floating-point tensors in, such as ``torch.bfloat16``. ``None``: the model's.
        key_map: maps names in the model to names in the files, as in :func:`load_safetensors`.
        timeout: seconds for which ranks wait for each other, at the start and at every exchange.

    Raises:
        CheckpointError: tensors are on the meta device; ranks have different tensors of the same name, or not all
            shards of one; ranks do not share the storage; it is full or fails; a rank did not call in time; or an
            earlier asynchronous save failed. The error is the same on all ranks, and the previous files are unchanged.
        ConfigurationError: an argument is invalid, or two tensors would have the same name in the files.
    """
    what = "save_safetensors"
    check_arguments("save_safetensors(model, path)", path, model)
    ranks = meet(what, timeout)
    save = _Save(Path(path), max_file_bytes)
    try:
        begun, own = ranks.exchange(what, lambda: save.contributions(model, dtype, key_map), save.begin)
        target = replace(begun, folder=Path(path))
        if save.left_out and ranks.rank == 0:
            names = ", ".join(save.left_out)
            warnings.warn(f"save_safetensors leaves out the extra state of modules: {names}", stacklevel=2)
        ranks.combine(what, lambda: save.write(target, own), lambda written: target.commit())
    except BaseException:
        save.abandon()
        raise


@dataclass(frozen=True)
class _Contribution:
    """One rank's description of its shard of a tensor: the full tensor, its other names, and the shard's extent."""

    spec: TensorSpec
    aliases: Sequence[str]
    extent: ShardExtent


class _Save:
    """One call of :func:`save_safetensors`, on one rank. ``_begun`` are the files that rank 0 has reserved."""

    def __init__(self, folder: Path, max_file_bytes: int) -> None:
        self._folder = folder
        self._max_file_bytes = max_file_bytes
        self._shards: dict[str, LocalShard] = {}
        self._begun: Replacement | None = None
        self.left_out: list[str] = []

    def contributions(self, model: nn.Module, dtype: torch.dtype | None, key_map: KeyMap | None) -> list[_Contribution]:
        if self._max_file_bytes < 1:
            raise ConfigurationError(f"max_file_bytes must be at least 1, not {self._max_file_bytes}.")
        if self._folder.suffix == ".safetensors" or self._folder.is_file():
            raise ConfigurationError(f"{self._folder} must be a directory: save_safetensors may write several files.")
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigurationError(f"dtype must be a floating-point one, not {dtype}.")
        tensors, self.left_out = keyed_tensors(model, key_map)
        _check_keys(tensors)
        found = []
        for tensor in tensors:
            name, part, own = tensor.keys[0], tensor.part, tensor.part.value.dtype
            self._shards[name] = part
            spec = TensorSpec(name, dtype if dtype is not None and own.is_floating_point else own, part.shape)
            found.append(_Contribution(spec, [key for key in tensor.keys[1:] if key != name], part.extent))
        return found

    def begin(self, contributions: Sequence[Sequence[_Contribution]]) -> list[tuple[Replacement, set[str]]]:
        """Reserve the files, and return for each rank these and the names of the tensors that it writes."""
        first, own = _assign_writes(contributions)
        aliases = {alias: name for name, entry in first.items() for alias in entry.aliases if alias not in first}
        specs = [entry.spec for entry in first.values()]
        self._begun = target = Replacement.of(self._folder, specs, aliases, self._max_file_bytes)
        target.begin()
        return [(target, names) for names in own]

    def write(self, target: Replacement, names: set[str]) -> None:
        with torch.no_grad():
            target.write({name: self._shards[name] for name in names})

    def abandon(self) -> None:
        if self._begun is not None:
            self._begun.abandon()


def _check_keys(tensors: Iterable[KeyedTensor]) -> None:
    names: dict[str, str] = {}
    for tensor in tensors:
        for name, key in zip(tensor.names, tensor.keys, strict=True):
            other = names.setdefault(key, tensor.names[0])
            if other != tensor.names[0]:
                raise ConfigurationError(f"key_map gives {key!r} to both {other!r} and {name!r}, which are not tied.")


def _assign_writes(contributions: Sequence[Sequence[_Contribution]]) -> tuple[dict[str, _Contribution], list[set[str]]]:
    """Return the first description of every tensor by name, and the tensors that each rank writes.

    Every element is written once. Several ranks may have the same shard, on a mesh that the tensor knows or, for
    parameters that tensor parallelism replicates, on one that it does not. They take turns, to share the work, except
    for full tensors: ranks may hold different values of a plain one, and the first rank's are written.
    """
    by_name: dict[str, dict[int, _Contribution]] = {}
    for rank, of_rank in enumerate(contributions):
        for entry in of_rank:
            by_name.setdefault(entry.spec.name, {})[rank] = entry
    first = {name: next(iter(of_ranks.values())) for name, of_ranks in by_name.items()}
    own: list[set[str]] = [set() for _ in contributions]
    problems = []
    for index, (name, of_ranks) in enumerate(by_name.items()):
        spec = first[name].spec
        ranks_by_extent: dict[ShardExtent, list[int]] = {}
        for rank, entry in of_ranks.items():
            if not entry.extent.is_empty or 0 in spec.shape:
                ranks_by_extent.setdefault(entry.extent, []).append(rank)
        count, total = sum(prod(extent.local_shape) for extent in ranks_by_extent), prod(spec.shape)
        others = [rank for rank, entry in of_ranks.items() if entry.spec != spec]
        if others:
            problems.append(
                f"{name} has another shape or dtype on {ranks_text(others)} than on rank {next(iter(of_ranks))}"
            )
        elif count != total:
            problems.append(f"of {name} all ranks together have {count} instead of {total} elements")
        for extent, ranks in ranks_by_extent.items():
            own[ranks[0 if extent.local_shape == spec.shape else index % len(ranks)]].add(name)
    if problems:
        raise CheckpointError(f"ranks do not hold the parts of one model: {'; '.join(problems)}.")
    return first, own


# -- files


_INCOMPLETE = ".incomplete-"
_PART = re.compile(r"model-([0-9a-f]+-)?\d{5}-of-\d{5}\.safetensors")


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
class Replacement:
    """The files of one save into ``folder``. ``token`` is unique to the save."""

    folder: Path
    token: str
    files: Sequence[FileLayout]

    @staticmethod
    def of(folder: Path, tensors: Iterable[TensorSpec], aliases: Mapping[str, str], max_file_bytes: int) -> Replacement:
        """Assign ``tensors`` to files in their order, with at most ``max_file_bytes`` of tensors in each.

        A tensor larger than that has a file of its own. ``aliases`` are other names of tensors.
        """
        groups: list[list[TensorSpec]] = [[]]
        size = 0
        for spec in tensors:
            if groups[-1] and size + spec.nbytes > max_file_bytes:
                groups.append([])
                size = 0
            groups[-1].append(spec)
            size += spec.nbytes
        token, names = secrets.token_hex(4), [SINGLE]
        if len(groups) > 1:
            has_parts = folder.is_dir() and any(_PART.fullmatch(path.name) for path in folder.iterdir())
            prefix = f"model-{token}" if has_parts else "model"
            names = [f"{prefix}-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
        files = [_file(name, group, aliases) for name, group in zip(names, groups, strict=True)]
        return Replacement(folder, token, files)

    @property
    def aside(self) -> Path:
        """The directory of the files until all are complete."""
        return self.folder / f"{_INCOMPLETE}{self.token}"

    @property
    def indexed(self) -> bool:
        return len(self.files) > 1

    @property
    def index(self) -> bytes:
        """The content of the index."""
        metadata = {"total_size": sum(s.nbytes for f in self.files for s in f.tensors)}
        weight_map = {spec.name: file.name for file in self.files for spec in file.tensors}
        return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, ensure_ascii=False).encode()

    def begin(self) -> None:
        """Create all files at full size with their headers, and delete what interrupted saves left behind."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob(f"{_INCOMPLETE}*"):
            shutil.rmtree(old)
        self.aside.mkdir()
        for file in self.files:
            with open(self.aside / file.name, "wb") as opened:
                opened.write(file.header)
                opened.flush()
                _reserve(opened.fileno(), file.nbytes)

    def write(self, shards: Mapping[str, LocalShard]) -> None:
        """Write ``shards`` to the places of their tensors, and flush them to disk."""
        for file in self.files:
            opened = self._open(file.name)
            try:
                for spec in file.tensors:
                    if spec.name in shards:
                        _write_part(opened, file.offsets[spec.name], spec, shards[spec.name])
                os.fsync(opened)
            finally:
                os.close(opened)

    def _open(self, name: str) -> int:
        try:
            return os.open(self.aside / name, os.O_WRONLY)
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.folder} is not the same directory here as on rank 0, which made {name} there. Save to storage "
                "that all ranks share."
            ) from None

    def commit(self) -> None:
        """Replace the old files with the new ones, which are complete and on disk."""
        for file in self.files:
            os.replace(self.aside / file.name, self.folder / file.name)
        if self.indexed:
            with open(self.aside / INDEX, "wb") as opened:
                opened.write(self.index)
                opened.flush()
                os.fsync(opened.fileno())
            sync(self.folder)
            os.replace(self.aside / INDEX, self.folder / INDEX)
        sync(self.folder)
        (self.folder / (SINGLE if self.indexed else INDEX)).unlink(missing_ok=True)
        sync(self.folder)
        self.aside.rmdir()
        current = {file.name for file in self.files}
        for path in self.folder.iterdir():
            if _PART.fullmatch(path.name) and path.name not in current:
                path.unlink()

    def abandon(self) -> None:
        shutil.rmtree(self.aside, ignore_errors=True)


def _file(name: str, tensors: Sequence[TensorSpec], aliases: Mapping[str, str]) -> FileLayout:
    """Order tensors by decreasing element size, so that all are aligned and readers can view them without a copy.

    Aliases are in the metadata, as ``safetensors.torch.save_model`` writes them; transformers requires ``format``.
    """
    held = {spec.name for spec in tensors}
    own = {alias: kept for alias, kept in aliases.items() if kept in held}
    return FileLayout(name, tuple(sorted(tensors, key=lambda spec: -spec.dtype.itemsize)), {"format": "pt"} | own)


def dtype_code(dtype: torch.dtype) -> str:
    for code, known in DTYPES.items():
        if known == dtype:
            return code
    raise CheckpointError(f"safetensors files cannot hold {dtype}. They hold {', '.join(map(str, DTYPES.values()))}.")


def _reserve(file: int, nbytes: int) -> None:
    """Allocate the disk space now, so that a full disk is an error here and not while ranks write."""
    if sys.platform == "linux":
        os.posix_fallocate(file, 0, nbytes)
    else:
        os.truncate(file, nbytes)


def sync(path: Path) -> None:
    """Flush a file to disk, or a directory, and with it the renames of files in it."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _write_part(opened: int, offset: int, spec: TensorSpec, part: LocalShard) -> None:
    """Write a shard of the tensor ``spec``, which begins at ``offset`` in the open file, block by block."""
    itemsize = spec.dtype.itemsize
    with ExitStack() as stack:
        try:
            local = stack.enter_context(part.plain(write=False))
        except CheckpointError as error:
            raise CheckpointError(f"{spec.name}: {error}") from error
        for box in part.extent.boxes():
            for piece in box.pieces(spec.shape, BLOCK_BYTES // itemsize):
                values = piece.of_part(local).to("cpu", spec.dtype).reshape(-1)
                length, starts = piece.runs(spec.shape)
                data = values.view(torch.uint8).numpy().data
                for i, start in enumerate(starts):
                    run = data[i * length * itemsize : (i + 1) * length * itemsize]
                    _write_at(opened, run, offset + start * itemsize)


def _write_at(opened: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(opened, data, offset)
        data, offset = data[done:], offset + done
