"""Hugging Face checkpoints, loaded directly into shards and written from them, without gathering tensors.

The safetensors library writes complete files from full tensors. torch's ``HuggingFaceStorageWriter`` writes all data
twice, and its consolidation leaves scalars at zero and raises for integer tensors; its reader ignores the index. So
files are written and read here, block by block.

Headers are built from shapes and dtypes alone, rank 0 reserves the files, and every rank writes its shards at their
offsets. Ranks exchange no tensors, write concurrently, and need memory for one block.

A file is the length of its header in 8 bytes, the header in JSON, and the values of its tensors, one after the other
(https://huggingface.co/docs/safetensors, Format). If there are several files, an index in JSON maps tensors to files.

The new checkpoint replaces the old one atomically. Until all new files are complete and on disk, they are in a hidden
directory. They get names that the old ones do not have, so that one operation switches to them: the rename of the file
or index that readers open, or the removal of ``model.safetensors`` if an index replaces it. Then old files are deleted.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.nn.modules.module import _IncompatibleKeys

from composable_fsdp._consistency.rank_report import format_ranks
from composable_fsdp._extents import DTYPES, Box, plain_name
from composable_fsdp._files import MOST_TEXT_BYTES, Directory, delete, read_text, regular_file
from composable_fsdp.checkpoint._coordination import (
    TIMEOUT,
    Arguments,
    Mismatch,
    check_arguments,
    differ,
    dtype_name,
    leave_common_unexpected,
    meet,
    refuse,
    said,
    tensor_text,
)
from composable_fsdp.checkpoint._state_dict.model import check_meshes, digest
from composable_fsdp.checkpoint._state_dict.tensors import LocalShard, check_parts, prepare_for_access, tensors_of
from composable_fsdp.errors import CheckpointError, ConfigurationError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_ANY_PART = re.compile(r".+-\d{5}-of-\d{5}\.safetensors")

BLOCK_BYTES = 4 << 20
"""The most bytes of a file that one block to read or to write spans."""

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
    stages. Each rank reads only the elements of its shards, with less than 32 MB of extra memory.

    Everything is checked on all ranks before anything is written, so after an error the model is unchanged, unless a
    file cannot be read: the error then says that the model is loaded in part. Files have no checksums.

    Args:
        model: a module in memory, sharded or not. After ``fully_shard`` on the meta device call
            :func:`composable_fsdp.to_empty` first. Every rank reads plain tensors in full.
        path_or_index: a ``.safetensors`` file, the ``.safetensors.index.json`` of several, or a directory with either,
            as ``save_pretrained`` and :func:`save_safetensors` write it.
        key_map: maps a name in the model, without prefixes of wrappers, to the name in the files:
            ``lambda name: f"model.{name}"`` or ``{"head.weight": "lm_head.weight"}``. Names that a mapping lacks are
            the same in both.
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

    def check() -> Arguments:
        check_arguments("load_safetensors(model, path)", path_or_index, model)
        return (), {"strict": bool(strict), "convert_dtype": bool(convert_dtype)}

    ranks = meet(load_safetensors, check, timeout)
    path = Path(path_or_index)
    mismatch = Mismatch()
    jobs: list[tuple[LocalShard, StoredTensor]] = []

    def match() -> _Fit:
        stored = read_headers(path)
        jobs.extend(_match(stored, keyed_tensors(model, key_map)[0], mismatch, strict, convert_dtype))
        return mismatch, digest(sorted((name, each.code, each.shape) for name, each in stored.items()))

    def verify(fits: list[_Fit]) -> list[str]:
        """Return the keys that no rank expects. Raise if anything does not fit."""
        mismatches = {rank: mismatch for rank, (mismatch, _) in enumerate(fits)}
        leave_common_unexpected(mismatches.values())
        ignored = () if strict else ("missing", "unexpected")
        refuse(f"{path} does not fit {type(model).__name__}", mismatches, ignored)
        others = [rank for rank, (_, seen) in enumerate(fits) if seen != fits[0][1]]
        if others:  # a path may be another directory on another host
            raise CheckpointError(
                f"{path} is not the same checkpoint on all ranks: {format_ranks(others)} found other tensors than "
                "rank 0. Put it on storage that all ranks share, or the same copy on every host."
            )
        return list(mismatches[0].unexpected)

    def read() -> None:
        for part, stored in sorted(jobs, key=lambda job: (job[1].file, job[1].begin)):
            _read_part(stored, part)

    unexpected = ranks.combine(what, match, verify)
    ranks.agree(what, read)
    return _IncompatibleKeys(list(mismatch.missing), unexpected)


_Fit = tuple[Mismatch, str]
"""Findings of one rank: the differences, and a digest that is equal if ranks see the same files."""


def _match(
    stored: Mapping[str, StoredTensor],
    tensors: list[KeyedTensor],
    mismatch: Mismatch,
    strict: bool,
    convert_dtype: bool,
) -> list[tuple[LocalShard, StoredTensor]]:
    """Return the shards that are in the files, each with its tensor there, and note all differences."""
    jobs: list[tuple[LocalShard, StoredTensor]] = []
    used: dict[str, StoredTensor] = {}
    for part, names in tensors:
        found: dict[str, tuple[str, StoredTensor]] = {}
        for key, name in names.items():
            if key in stored:
                found.setdefault(stored[key].name, (name, stored[key]))
        used |= {key: each for key, (_, each) in found.items()}
        if not found:
            key, name = next(iter(names.items()))
            mismatch.missing[name] = tensor_text(part.value.dtype, part.shape) + _key_note(name, key)
            continue
        (_, first), *others = found.values()
        jobs.append((part, first))
        for name, each in list(found.values())[: None if strict else 1]:
            _compare(name, part, each, convert_dtype, mismatch)
        if strict and not mismatch.shapes and not mismatch.dtypes:
            mismatch.others += [text for _, each in others for text in _check_tie(part, first, each)]
    unexpected = (each for key, each in stored.items() if key == each.name and key not in used)
    mismatch.unexpected = {each.name: f"{_dtype_of(each)} {each.shape}" for each in unexpected}
    return jobs


@torch.no_grad()
def _read_part(stored: StoredTensor, part: LocalShard) -> None:
    try:
        with part.plain(write=True) as local:
            for box, values in stored.blocks(part.extent.boxes()):
                box.of_part(local).copy_(values)
    except Exception as error:
        raise CheckpointError(
            f"{stored.file} could not be read at {stored.name!r}: {error}. The model is loaded in part."
        ) from error


def _compare(name: str, part: LocalShard, stored: StoredTensor, convert_dtype: bool, mismatch: Mismatch) -> None:
    """Add to ``mismatch`` why ``stored`` cannot be loaded into ``part``."""
    dtype, note = part.value.dtype, _key_note(name, stored.name)
    fits = stored.dtype is not None and torch.can_cast(stored.dtype, dtype)
    if stored.shape != part.shape:
        mismatch.shapes[name] = differ(stored.shape, part.shape) + note
    elif not fits or (stored.dtype != dtype and not convert_dtype):
        advice = " (convert_dtype=True converts it)" if fits else ""
        mismatch.dtypes[name] = differ(_dtype_of(stored), dtype_name(dtype)) + note + advice


def _check_tie(part: LocalShard, first: StoredTensor, other: StoredTensor) -> Iterator[str]:
    """Yield an error text if the values of two tensors differ in this rank's shard."""
    pairs = zip(*(each.blocks(part.extent.boxes()) for each in (first, other)), strict=True)
    if not all(torch.equal(*(t.reshape(-1).view(torch.uint8) for _, t in pair)) for pair in pairs):
        yield f"tied in the model, but with different values in the files: {first.name} and {other.name}"


def _key_note(name: str, key: str) -> str:
    return "" if name == key else f" (in the files {key})"


def _dtype_of(stored: StoredTensor) -> str:
    return stored.code if stored.dtype is None else dtype_name(stored.dtype)


# -- the model's tensors


KeyedTensor = tuple[LocalShard, dict[str, str]]
"""This rank's shard of a tensor, and the names of the tensor in the model by its keys in the files."""


def keyed_tensors(model: nn.Module, key_map: KeyMap | None) -> tuple[list[KeyedTensor], list[str]]:
    """Prepare ``model`` for access, and return its parameters and persistent buffers, and names of its extra state."""
    mapping = {} if key_map is None else key_map
    if not isinstance(mapping, Mapping) and not callable(mapping):
        raise ConfigurationError(f"key_map must be a mapping or a callable of names, not {type(key_map).__name__}.")
    prepare_for_access(model)
    tensors, others = tensors_of(model)
    found = []
    for entries in tensors:
        names: dict[str, str] = {}
        for name in (entry.name for entry in entries):
            key = mapping.get(name, name) if isinstance(mapping, Mapping) else mapping(name)
            if not isinstance(key, str):
                raise ConfigurationError(
                    f"key_map gives {key!r} for {name!r}: it renames, and cannot leave out a tensor. For a part of the "
                    "model, take full_tensor() on all ranks, and write with safetensors.torch.save_file on one."
                )
            names.setdefault(key, name)
        found.append((LocalShard(entries[0].value, entries[0].sharding), names))
    return found, [entry.name for entry in others]


# -- files


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its name, the file, the format's name for its dtype, its shape, and its first byte."""

    name: str
    file: Path
    code: str
    shape: tuple[int, ...]
    begin: int

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype, or ``None`` if torch has no such dtype."""
        return DTYPES.get(self.code)

    def blocks(self, boxes: Iterable[Box]) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield the values in ``boxes`` in pieces, which span at most ``BLOCK_BYTES`` of the file and share a buffer.

        The file is read and not mapped, so one that its owner truncates meanwhile is an error, and no SIGBUS.
        """
        dtype, shape = DTYPES[self.code], self.shape
        itemsize, most = dtype.itemsize, BLOCK_BYTES // dtype.itemsize
        buffer = torch.empty(min(most, prod(shape)), dtype=dtype)
        raw = buffer.view(torch.uint8).numpy().data
        with open(self.file, "rb", buffering=0) as file:
            for piece in (piece for box in boxes for piece in box.pieces(shape, most)):
                length, starts = piece.runs(shape)
                for number, start in enumerate(starts):
                    data = raw[number * length * itemsize : (number + 1) * length * itemsize]
                    _read_at(file.fileno(), data, self.begin + start * itemsize)
                yield piece, buffer[: prod(piece.sizes)].view(piece.sizes)


def _read_at(opened: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.preadv(opened, [data], offset)
        if not done:
            raise OSError("its end is missing, which was there before")
        data, offset = data[done:], offset + done


def read_headers(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a ``.safetensors`` file, an index, or a directory with either, by name and other names.

    Headers have the tensors' ends, so truncation is detected.
    """
    main = main_file(path)
    tensors: dict[str, StoredTensor] = {}
    aliases: dict[str, str] = {}
    for file, names in (_read_index(main) if main.suffix == ".json" else {main: []}).items():
        held, others = _read_header(file)
        if absent := sorted(set(names) - held.keys()):
            raise CheckpointError(f"{file} lacks tensors that the index says it has: {', '.join(absent)}")
        if twice := sorted(held.keys() & tensors.keys()):
            raise CheckpointError(f"{twice[0]!r} is in two files: {tensors[twice[0]].file} and {file}")
        tensors |= held
        aliases |= others
    aliases = {plain_name(name): name for name in tensors} | aliases  # of compiled models
    return {alias: tensors[name] for alias, name in aliases.items() if name in tensors} | tensors


def _read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors and the metadata of a file. The safetensors library checks its header first."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise CheckpointError(
            f"{path} cannot be read without the safetensors library: pip install safetensors"
        ) from error
    if not path.is_file():
        raise CheckpointError(f"{path} is missing.")
    try:
        with safe_open(path, framework="pt", device="cpu"), open(path, "rb", buffering=0) as file:
            nbytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(nbytes, MOST_TEXT_BYTES)))
        metadata = header.pop("__metadata__", None) or {}
        return {
            name: StoredTensor(name, path, entry["dtype"], tuple(entry["shape"]), 8 + nbytes + entry["data_offsets"][0])
            for name, entry in sorted(header.items())
        }, metadata
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged, or no safetensors file: {error}") from error


def _read_index(path: Path) -> dict[Path, list[str]]:
    """Return the names of the tensors in each file, which is a regular file in the folder of the index."""
    files: dict[str, list[str]] = {}
    try:
        index = json.loads(read_text(path.parent, path.name), object_pairs_hook=_without_doubles)
        for name, file in index["weight_map"].items():
            if type(file) is not str:
                raise TypeError(f"the file of {name!r} is no text")
            files.setdefault(file, []).append(name)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged, or no safetensors index: {said(error)}") from error
    return {_listed(path, file, names[0]): names for file, names in files.items()}


def _listed(index: Path, file: str, name: str) -> Path:
    """Return the path of ``file``, which has the tensor ``name`` by ``index``."""
    try:
        regular_file(index.parent, file)
    except FileNotFoundError as error:
        raise CheckpointError(f"{index.parent / file} is missing. {index.name} says that {name!r} is in it.") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{index} says that {name!r} is in {file!r}, which is refused: {error}") from error
    return index.parent / file


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is in it twice")
        found[name] = value
    return found


def main_file(path: Path) -> Path:
    """Return the file or index to open for ``path``. As with Hugging Face, a single file has priority over an index."""
    if not path.is_dir():
        return path
    indexes, files = sorted(path.glob("*.safetensors.index.json")), sorted(path.glob("*.safetensors"))
    usual = [path / name for name in (SINGLE, INDEX) if (path / name).is_file()]
    found = usual[:1] or indexes or [file for file in files if not _ANY_PART.fullmatch(file.name)]
    if len(found) == 1:
        try:
            regular_file(path, found[0].name)  # the user has named the folder, and not the file
        except OSError as error:
            raise CheckpointError(f"{found[0]} cannot be read: {error}") from error
        return found[0]
    which = f"several: {', '.join(p.name for p in found)}. Pass the path of one" if found else "none"
    if files and not found:
        which = f"only parts of one, such as {files[0].name}, without the index"
    raise CheckpointError(f"{path} should have one safetensors file or index, but has {which}.")


# -- save


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
    ``model.safetensors.index.json``, as ``save_pretrained`` of transformers writes them. Other files in it are kept. An
    existing checkpoint is replaced only when the new one is complete and on disk: if a save is interrupted, even by a
    kill, readers find one of the two, complete. Files have no checksums.

    Every rank writes its own shards block by block, with less than 32 MB of extra memory; of replicas one writes. Tied
    parameters are written once, under the first of their names; the others are in the metadata, where
    :func:`load_safetensors` finds them. Extra state of modules is left out, with a warning.

    Args:
        model: a module, sharded or not. For plain tensors the values of one rank that has them are written.
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

    def check() -> Arguments:
        check_arguments("save_safetensors(model, path)", path, model)
        return (), {"max_file_bytes": max_file_bytes, "dtype": dtype}

    ranks, folder = meet(save_safetensors, check, timeout), Path(path)
    shards: dict[str, LocalShard] = {}
    left_out: list[str] = []
    aside: Directory  # on rank 0
    begun = ExitStack()

    def plan() -> _Plan:
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigurationError(f"dtype must be a floating-point one, not {dtype}.")
        if folder.suffix == ".safetensors" or (folder.exists() and not folder.is_dir()):
            raise ConfigurationError(f"{folder} must be a directory: there may be several files of safetensors.")
        tensors, others = keyed_tensors(model, key_map)
        left_out.extend(others)
        shards.update({next(iter(names)): part for part, names in tensors})
        items = [item for name, part in shards.items() for item in _write_items(name, part, dtype)]
        return SavePlan(items), _names_of(tensors)

    def begin(planned: list[_Plan]) -> list[tuple[Replacement, SavePlan]]:
        nonlocal aside
        names = dict.fromkeys(item.index.fqn for plan, _ in planned for item in plan.items)
        check_parts([plan for plan, _ in planned])
        plans, metadata = DefaultSavePlanner(flatten_state_dict=False).create_global_plan([p for p, _ in planned])
        aliases = {alias: name for _, known in planned for alias, name in known.items() if alias not in names}
        saved = {name: cast(TensorStorageMetadata, metadata.state_dict_metadata[name]) for name in names}
        specs = [TensorSpec(name, each.properties.dtype, tuple(each.size)) for name, each in saved.items()]
        replacement = Replacement.of(folder, specs, aliases, max_file_bytes)
        aside = begun.enter_context(replacement.begun())
        return [(replacement, plan) for plan in plans]

    with begun:
        target, own = ranks.exchange(what, plan, begin)
        check_meshes(ranks, what, shards)
        target = replace(target, folder=folder)
        ranks.combine(what, lambda: target.write(shards, own), lambda written: target.commit(aside))
    if left_out and ranks.rank == 0:  # here, since a warning may be an error
        names = ", ".join(left_out)
        warnings.warn(f"save_safetensors leaves out the extra state of modules: {names}", stacklevel=2)


_Plan = tuple[SavePlan, dict[str, str]]
"""The blocks that one rank has, and the further names of its tensors."""


def _write_items(name: str, part: LocalShard, dtype: torch.dtype | None) -> list[WriteItem]:
    """Return the items of DCP's plan for the blocks of a shard: what is planned needs no memory."""
    own = part.value.dtype
    written = dtype if dtype is not None and own.is_floating_point else own
    planned = torch.empty(part.extent.local_shape, dtype=written, device="meta")
    return LocalShard(planned, extent=part.extent).__create_write_items__(name, None)


def _names_of(tensors: Iterable[KeyedTensor]) -> dict[str, str]:
    """Return the further names of each tensor in the files, with the first. Raise if two tensors have the same name."""
    first: dict[str, str] = {}
    further: dict[str, str] = {}
    for names in (names for _, names in tensors):
        kept, *others = names
        for key, name in names.items():
            other = first.setdefault(key, names[kept])
            if other != names[kept]:
                raise ConfigurationError(f"key_map gives {key!r} to both {other!r} and {name!r}, which are not tied.")
        further |= dict.fromkeys(others, kept)
    return further


# -- files


_INCOMPLETE = ".incomplete-"
_OWN_PART = re.compile(r"model-([0-9a-f]+-)?\d{5}-of-\d{5}\.safetensors")


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
    """The layout of one file: the bytes before the first tensor, and the offset of each tensor's first byte.

    Invariant: tensors are contiguous, and each begins at a multiple of its element size.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    header: bytes
    offsets: Mapping[str, int]
    nbytes: int

    @staticmethod
    def of(name: str, tensors: Sequence[TensorSpec], aliases: Mapping[str, str]) -> FileLayout:
        """Order tensors by decreasing element size, so that all are aligned and readers can view them without a copy.

        Aliases are in the metadata, as ``safetensors.torch.save_model`` writes them; transformers requires ``format``.
        """
        ordered = tuple(sorted(tensors, key=lambda spec: -spec.dtype.itemsize))
        bounds = list(accumulate((spec.nbytes for spec in ordered), initial=0))
        places = dict(zip((spec.name for spec in ordered), pairwise(bounds), strict=True))
        own = {alias: kept for alias, kept in aliases.items() if kept in places}
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"} | own}
        if "__metadata__" in places:
            raise CheckpointError("safetensors files cannot hold a tensor called __metadata__. Give it another name.")
        for spec in ordered:
            code, place = dtype_code(spec.dtype), places[spec.name]
            entries[spec.name] = {"dtype": code, "shape": spec.shape, "data_offsets": place}
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        offsets = {name: len(header) + begin for name, (begin, _) in places.items()}
        return FileLayout(name, ordered, header, offsets, len(header) + bounds[-1])


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
            has_parts = folder.is_dir() and any(_OWN_PART.fullmatch(path.name) for path in folder.iterdir())
            prefix = f"model-{token}" if has_parts else "model"
            names = [f"{prefix}-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
        files = [FileLayout.of(name, group, aliases) for name, group in zip(names, groups, strict=True)]
        return Replacement(folder, token, files)

    @property
    def aside(self) -> Path:
        """The directory of the files until all are complete."""
        return self.folder / f"{_INCOMPLETE}{self.token}"

    @contextmanager
    def begun(self) -> Iterator[Directory]:
        """Yield the new directory of the files, at full size with their headers. In an error, delete it.

        What interrupted saves left behind is deleted first.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob(f"{_INCOMPLETE}*"):
            delete(old)
        with closing(Directory.make(self.aside)) as aside:
            try:
                for file in self.files:
                    with open(file.name, "xb", opener=aside.opener) as opened, _naming(self.aside / file.name):
                        opened.write(file.header)
                        opened.flush()
                        # Allocate the disk space now: a full disk is an error here, and not while ranks write.
                        os.posix_fallocate(opened.fileno(), 0, file.nbytes)
                yield aside
            except BaseException:
                delete(self.aside)
                raise

    @torch.no_grad()
    def write(self, shards: Mapping[str, LocalShard], plan: SavePlan) -> None:
        """Write the blocks in ``plan`` of ``shards`` to the places of their tensors, and to disk."""
        planned = {(item.index.fqn, item.index.offset) for item in plan.items}
        try:
            directory = Directory(self.aside)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{self.folder} is not the same directory here as on rank 0, which made {self.aside.name} there. Save "
                "to storage that all ranks share."
            ) from error
        with closing(directory):
            for file in self.files:
                with directory.reopen(file.name) as opened, _naming(self.aside / file.name):
                    for spec in (spec for spec in file.tensors if spec.name in shards):
                        part = shards[spec.name]
                        boxes = [box for box in part.extent.boxes() if (spec.name, box.offsets) in planned]
                        _write_boxes(opened.fileno(), file.offsets[spec.name], spec, part, boxes)
                    os.fsync(opened.fileno())

    def commit(self, aside: Directory) -> None:
        """Replace the old files with the new ones in ``aside``, which are complete and on disk."""
        aside.sync()
        for file in self.files:
            aside.move(file.name, self.folder / file.name)
        indexed = len(self.files) > 1
        if indexed:
            size = sum(spec.nbytes for file in self.files for spec in file.tensors)
            names = {spec.name: file.name for file in self.files for spec in file.tensors}
            index = {"metadata": {"total_size": size}, "weight_map": names}
            aside.write(INDEX, json.dumps(index, indent=2, ensure_ascii=False).encode())
            sync(self.folder)
            aside.move(INDEX, self.folder / INDEX)
        sync(self.folder)
        (self.folder / (SINGLE if indexed else INDEX)).unlink(missing_ok=True)
        sync(self.folder)
        self.aside.rmdir()
        current = {file.name for file in self.files}
        for path in self.folder.iterdir():
            if _OWN_PART.fullmatch(path.name) and path.name not in current:
                path.unlink()


def dtype_code(dtype: torch.dtype) -> str:
    for code, known in DTYPES.items():
        if known == dtype:
            return code
    raise CheckpointError(f"safetensors files cannot hold {dtype}. They hold {', '.join(map(str, DTYPES.values()))}.")


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Add ``file`` to an ``OSError`` of a call that got a descriptor, and so names no file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error


def sync(path: Path) -> None:
    """Flush a file to disk, or a directory, and with it the renames of files in it."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _write_boxes(opened: int, offset: int, spec: TensorSpec, part: LocalShard, boxes: Sequence[Box]) -> None:
    """Write ``boxes`` of a shard of the tensor ``spec``, which begins at ``offset`` in the open file."""
    if not boxes:
        return
    itemsize = spec.dtype.itemsize
    try:
        with part.plain(write=False) as local:
            for box in boxes:
                for piece in box.pieces(spec.shape, BLOCK_BYTES // itemsize):
                    values = piece.of_part(local).to("cpu", spec.dtype).reshape(-1)
                    length, starts = piece.runs(spec.shape)
                    runs = values.view(torch.uint8).numpy().data
                    for i, start in enumerate(starts):
                        run = runs[i * length * itemsize : (i + 1) * length * itemsize]
                        _write_at(opened, run, offset + start * itemsize)
    except CheckpointError as error:
        raise CheckpointError(f"{spec.name}: {error}") from error


def _write_at(opened: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(opened, data, offset)
        data, offset = data[done:], offset + done
