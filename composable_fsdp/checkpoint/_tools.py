"""Inspection of checkpoints, and conversion to safetensors, without a model, a process group or a GPU.

The paths of tensors are those of ``_dcp/save.py``, such as ``("optimizer", "state", name, key)``. Between directories
and files of ``torch.save``, ``torch.distributed.checkpoint.format_utils`` converts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from composable_fsdp.checkpoint._coordination import dtype_name
from composable_fsdp.checkpoint._dcp import directory
from composable_fsdp.checkpoint._dcp.directory import Manifest
from composable_fsdp.checkpoint._dcp.load import read as read_values
from composable_fsdp.checkpoint._dcp.load import with_plain_names
from composable_fsdp.checkpoint._dcp.metadata import read_metadata
from composable_fsdp.checkpoint._dcp.save import ContentsPath, key_of
from composable_fsdp.checkpoint._safetensors import (
    INDEX,
    SINGLE,
    Replacement,
    TensorSpec,
    check_directory,
    check_options,
)
from composable_fsdp.checkpoint._state_dict.tensors import LocalShard
from composable_fsdp.errors import CheckpointError, ConfigurationError

Tensors = dict[ContentsPath, torch.Tensor]
"""Tensors by path."""


@dataclass(frozen=True)
class Source:
    """A checkpoint that is open for reading: a directory of ``torch.distributed.checkpoint``, perhaps by ``save``.

    Args:
        tensors: shape and dtype by path, as tensors on the meta device. Tied tensors are listed once.
        aliases: further paths of tied tensors, with the path in ``tensors``.
        objects: the paths of values that are not tensors.
        read: returns the tensors at the given paths, on the CPU.
        manifest: the manifest, if ``save`` wrote the checkpoint.
    """

    path: Path
    tensors: Tensors
    aliases: Mapping[ContentsPath, ContentsPath]
    objects: Sequence[ContentsPath]
    read: Callable[[Iterable[ContentsPath]], Tensors]
    manifest: Manifest | None = None


def is_folder(path: Path) -> bool:
    """Return whether ``path`` is a folder of checkpoints, as ``save`` creates it, and no single one."""
    is_checkpoint = any((path / name).is_file() for name in (directory.MANIFEST, directory.METADATA))
    return path.is_dir() and not is_checkpoint and bool(directory.candidates(path))


def open_source(path: Path) -> Source:
    """Open the checkpoint at ``path``, or the newest one in the folder ``path``.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file, and no directory of a checkpoint. torch.load(path, mmap=True) reads one of torch.save, "
            "and safetensors.safe_open safetensors; safetensors.torch.save_file writes a state dict."
        )
    folder = directory.find(path)
    manifest, problem = directory.read_manifest(folder) if (folder / directory.MANIFEST).exists() else (None, "")
    if problem:
        raise CheckpointError(problem)
    metadata = with_plain_names(read_metadata(folder, manifest))
    saved, noted = metadata.state_dict_metadata, metadata.planner_data or {}
    keys: dict[ContentsPath, str] = {tuple(noted.get(key) or key.split(".", 1)): key for key in saved}
    found: dict[ContentsPath, tuple[object, torch.Tensor]] = {}
    for at, key in keys.items():
        tensor = saved[key]
        if isinstance(tensor, TensorStorageMetadata):
            # The positions in files are equal for all names of a tensor that was written once.
            infos = [metadata.storage_data[MetadataIndex(key, chunk.offsets)] for chunk in tensor.chunks]
            memory = tuple((info.relative_path, info.offset) for info in infos)
            found[at] = memory, torch.empty(tensor.size, dtype=tensor.properties.dtype, device="meta")
    tensors, aliases = _tied(found)

    def read(paths: Iterable[ContentsPath]) -> Tensors:
        values = {at: torch.empty_like(tensors[at], device="cpu") for at in paths}
        read_values(folder, metadata, {keys[at]: LocalShard(value) for at, value in values.items()})
        return values

    return Source(folder, tensors, aliases, [at for at in keys if at not in found], read, manifest)


def _tied(
    found: Mapping[ContentsPath, tuple[object, torch.Tensor]],
) -> tuple[Tensors, dict[ContentsPath, ContentsPath]]:
    """Return the tensors, and the further paths of those that are in the same memory, given by a value for each."""
    first: dict[object, ContentsPath] = {}
    aliases: dict[ContentsPath, ContentsPath] = {}
    for at, (memory, tensor) in found.items():
        if tensor.numel() and (same := first.setdefault((at[0], memory), at)) != at:
            aliases[at] = same
    return {at: tensor for at, (_, tensor) in found.items() if at not in aliases}, aliases


# -- inspect


@dataclass(frozen=True)
class Tensor:
    """Name, shape, dtype without ``torch.``, and bytes of a tensor. ``same_as`` names the tensor that it is tied to."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    same_as: str | None = None


@dataclass(frozen=True)
class Description:
    """A summary of one checkpoint. ``saved`` has step, ranks and versions from the manifest; it is empty without one.

    ``tensors`` are the model's, including tied names. ``optimizer`` is the number of parameters with optimizer state,
    ``others`` the bytes of tensors by other top-level key. ``problems`` has a sentence for each damaged file.
    """

    path: str
    saved: dict[str, Any]
    tensors: tuple[Tensor, ...]
    optimizer: int
    others: dict[str, int]
    nbytes: int
    problems: tuple[str, ...] = ()
    kind: str = "dcp"


def describe(path: Path, *, verify: bool = False) -> Description:
    """Return a summary of the checkpoint at ``path``. Without ``verify`` only sizes of files are compared.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    source = open_source(path)
    manifest = source.manifest
    saved = {} if manifest is None else {k: getattr(manifest, k) for k in ("step", "ranks", "library", "torch")}
    tensors = [_tensor(source, at) for at in (*source.tensors, *source.aliases) if at[0] == "model"]
    others = {at[0]: 0 for at in (*source.tensors, *source.objects) if at[0] != "model"}
    for at, spec in source.tensors.items():
        if at[0] in others:
            others[at[0]] += spec.nbytes
    stateful = {at[:3] for at in (*source.tensors, *source.objects) if at[:2] == ("optimizer", "state")}
    return Description(
        path=str(source.path),
        saved=saved,
        tensors=tuple(tensors),
        optimizer=len(stateful),
        others=others,
        nbytes=sum(spec.nbytes for spec in source.tensors.values()),
        problems=tuple(directory.problems_of(source.path, contents=verify)) if manifest or verify else (),
    )


def _tensor(source: Source, path: ContentsPath) -> Tensor:
    of = source.aliases.get(path)
    spec = source.tensors[of or path]
    name, same_as = key_of(path[1:]), None if of is None else key_of(of[1:])
    return Tensor(name, tuple(spec.shape), dtype_name(spec.dtype), spec.nbytes, same_as)


# -- folders


@dataclass(frozen=True)
class FolderRow:
    """A checkpoint in a folder. ``problem`` describes its damage. ``ranks`` and ``nbytes`` are 0 without a manifest."""

    step: int
    name: str
    ranks: int
    nbytes: int
    problem: str | None


@dataclass(frozen=True)
class FolderDescription:
    """All checkpoints in a folder by ascending step, and ``leftovers`` of killed saves, which the next save removes."""

    path: str
    checkpoints: tuple[FolderRow, ...]
    newest: str
    newest_intact: str | None
    leftovers: tuple[str, ...]
    kind: str = "folder"


def describe_folder(path: Path, *, verify: bool = False) -> FolderDescription:
    found = directory.candidates(path)
    rows = []
    for step, each in found.items():
        manifest, problems = _examine(each, verify)
        ranks, files = (0, {}) if manifest is None else (manifest.ranks, manifest.files)
        nbytes = sum(file.bytes for file in files.values())
        rows.append(FolderRow(step, each.name, ranks, nbytes, " ".join(problems) or None))
    intact = [row.name for row in rows if row.problem is None]
    names = {row.name for row in rows}
    left = [name for name in directory.leftovers(path) if name not in names]
    return FolderDescription(str(path), tuple(rows), rows[-1].name, intact[-1] if intact else None, tuple(left))


def _examine(checkpoint: Path, contents: bool) -> tuple[Manifest | None, list[str]]:
    """Return the manifest, and a sentence for each damaged file. A manifest of another format is one of them."""
    try:
        return directory.read_manifest(checkpoint)[0], list(directory.problems_of(checkpoint, contents=contents))
    except CheckpointError as error:
        return None, [str(error)]


# -- convert


MAX_FILE_BYTES = 5 * 10**9

_WORDS = {
    "classes": "classes of tensors",
    "model": "extra state of modules",
    "ranks": "extra and random number generators",
}
"""Names for what is left out. The step is not listed: safetensors have none."""


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    force: bool = False,
    verify: bool = True,
) -> list[str]:
    """Write the model of the checkpoint ``source`` to safetensors in ``target``, with all of its tensors in memory.

    The conversion is atomic: an existing target is replaced only once the new one is complete. Tied weights stay tied.
    Arguments are those of the command.

    Returns:
        Descriptions of what was left out.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or the target exists.
        ConfigurationError: an argument is invalid.
    """
    given, goal = Path(source), Path(target)
    check_options(max_file_bytes, dtype)
    check_directory(goal)
    opened = open_source(given)
    if any((goal / file).exists() for file in (SINGLE, INDEX)) and not force:
        raise CheckpointError(f"{goal} exists already. Pass --force to replace it.")
    if goal.exists() and (goal.samefile(opened.path) or goal.samefile(given)):
        raise ConfigurationError(f"{goal} is the source of the conversion. Name another target.")
    if verify and opened.manifest is not None and (problems := list(directory.problems_of(opened.path))):
        raise CheckpointError("\n".join(problems))
    paths = [path for path in opened.tensors if path[0] == "model"]
    if not paths:
        raise CheckpointError(
            f"{opened.path} has no model: neither a state dict under the key 'model' nor tensors at the top level. "
            "Save its state dict as a file of its own."
        )
    values = {key_of(path[1:]): value for path, value in opened.read(paths).items()}
    values = {n: v.to(dtype) if dtype is not None and v.is_floating_point() else v for n, v in values.items()}
    aliases = {key_of(alias[1:]): key_of(of[1:]) for alias, of in opened.aliases.items() if alias[0] == "model"}
    specs = [TensorSpec(name, value.dtype, tuple(value.shape)) for name, value in values.items()]
    replacement = Replacement.of(goal, specs, aliases, max_file_bytes)
    with replacement.begun() as aside:
        replacement.write({name: LocalShard(value) for name, value in values.items()})
        replacement.commit(aside)
    left = [path for path in (*opened.tensors, *opened.objects) if path not in paths and path != ("step",)]
    return sorted({_WORDS.get(path[0], path[0]) for path in left})
