"""Inspection of checkpoints, and conversion to safetensors, without a model, a process group or a GPU.

The paths of tensors are those of ``_dcp/save.py``, such as ``("optimizer", "state", name, key)``. Between directories
and files of ``torch.save``, ``torch.distributed.checkpoint.format_utils`` converts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from composable_fsdp.checkpoint._coordination import dtype_name
from composable_fsdp.checkpoint._dcp import directory
from composable_fsdp.checkpoint._dcp.directory import Manifest
from composable_fsdp.checkpoint._dcp.load import read, with_plain_names
from composable_fsdp.checkpoint._dcp.metadata import read_metadata
from composable_fsdp.checkpoint._dcp.save import ContentsPath, key_of
from composable_fsdp.checkpoint._safetensors import INDEX, SINGLE, save_safetensors
from composable_fsdp.checkpoint._state_dict.tensors import LocalShard
from composable_fsdp.errors import CheckpointError, ConfigurationError


@dataclass(frozen=True)
class Source:
    """A checkpoint that is open for reading: a directory of ``torch.distributed.checkpoint``, perhaps by ``save``.

    ``paths`` are those of all values by key, ``tensors`` the metadata of tensors, and ``aliases`` the keys of tensors
    that are tied to another one, with its key. ``manifest`` is there if ``save`` wrote the checkpoint.
    """

    folder: Path
    manifest: Manifest | None
    metadata: Metadata
    paths: Mapping[str, ContentsPath]
    tensors: Mapping[str, TensorStorageMetadata]
    aliases: Mapping[str, str]


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
    folder = directory.checkpoints_at(path)[0]
    manifest, problem = None, ""
    if directory.has_file(folder / directory.MANIFEST) or folder != path:
        manifest, problem = directory.read_manifest(folder)
    if problem:
        raise CheckpointError(problem)
    metadata = with_plain_names(read_metadata(folder, manifest))
    saved, noted = metadata.state_dict_metadata, metadata.planner_data or {}
    tensors = {key: each for key, each in saved.items() if isinstance(each, TensorStorageMetadata)}
    paths = {key: tuple(noted.get(key) or key.split(".", 1)) for key in saved}
    first: dict[object, str] = {}
    aliases: dict[str, str] = {}
    for key, each in tensors.items():
        # The positions in files are equal for all names of a tensor that was written once.
        places = [metadata.storage_data[MetadataIndex(key, chunk.offsets)] for chunk in each.chunks]
        memory = paths[key][0], *((place.relative_path, place.offset) for place in places)
        if prod(each.size) and (same := first.setdefault(memory, key)) != key:
            aliases[key] = same
    return Source(folder, manifest, metadata, paths, tensors, aliases)


def _nbytes(saved: TensorStorageMetadata) -> int:
    return prod(saved.size) * saved.properties.dtype.itemsize


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


def describe(path: Path, *, verify: bool = False) -> Description:
    """Return a summary of the checkpoint at ``path``, or of the newest one in the folder ``path``.

    Without ``verify`` only sizes of files are compared.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    source = open_source(path)
    manifest, aliases, paths = source.manifest, source.aliases, source.paths
    saved = {} if manifest is None else {k: getattr(manifest, k) for k in ("step", "ranks", "library", "torch")}
    tensors: list[Tensor] = []
    for key, each in source.tensors.items():
        if paths[key][0] == "model":
            dtype, same_as = dtype_name(each.properties.dtype), aliases.get(key)
            name, other = key_of(paths[key][1:]), None if same_as is None else key_of(paths[same_as][1:])
            tensors.append(Tensor(name, tuple(each.size), dtype, _nbytes(each), other))
    sizes = {key: _nbytes(each) for key, each in source.tensors.items() if key not in aliases}
    others = {at[0]: 0 for at in paths.values() if at[0] != "model"}
    for key, nbytes in sizes.items():
        if paths[key][0] in others:
            others[paths[key][0]] += nbytes
    return Description(
        path=str(source.folder),
        saved=saved,
        tensors=tuple(tensors),
        optimizer=len({at[:3] for at in paths.values() if at[:2] == ("optimizer", "state")}),
        others=others,
        nbytes=sum(sizes.values()),
        problems=tuple(directory.problems_of(source.folder, contents=verify)) if manifest or verify else (),
    )


# -- convert


_WORDS = {
    "classes": "classes of tensors",
    "model": "extra state of modules",
    "ranks": "extra and random number generators",
}
"""Names for what is left out. The step is not listed: safetensors have none."""


class _Values(nn.Module):
    """A model of ``values`` by name. Tied tensors are one object."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.values = values

    def state_dict(self, **_: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return self.values


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5 * 10**9,
    force: bool = False,
) -> list[str]:
    """Write the model of the checkpoint ``source`` to safetensors in ``target``, with all of its tensors in memory.

    The conversion is atomic: an existing target is replaced only once the new one is complete. Tied weights stay tied.
    Arguments are those of the command.

    Returns:
        Descriptions of what was left out.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, the target exists, or it cannot be written.
        ConfigurationError: an argument is invalid.
    """
    given, goal = Path(source), Path(target)
    opened = open_source(given)
    if any((goal / file).exists() for file in (SINGLE, INDEX)) and not force:
        raise CheckpointError(f"{goal} exists already. Pass --force to replace it.")
    if goal.exists() and (goal.samefile(opened.folder) or goal.samefile(given)):
        raise ConfigurationError(f"{goal} is the source of the conversion. Name another target.")
    if opened.manifest is not None and (problems := list(directory.problems_of(opened.folder))):
        raise CheckpointError("\n".join(problems))
    names = {key: key_of(opened.paths[key][1:]) for key in opened.tensors if opened.paths[key][0] == "model"}
    if not names:
        raise CheckpointError(
            f"{opened.folder} has no model: neither a state dict under the key 'model' nor tensors at the top level. "
            "Save its state dict as a file of its own."
        )
    own = {key: opened.tensors[key] for key in names if key not in opened.aliases}
    values = {key: torch.empty(saved.size, dtype=saved.properties.dtype) for key, saved in own.items()}
    read(opened.folder, opened.metadata, {key: LocalShard(value) for key, value in values.items()})
    model = _Values({name: values[opened.aliases.get(key, key)] for key, name in names.items()})
    save_safetensors(model, goal, max_file_bytes=max_file_bytes, dtype=dtype)
    left = [path[0] for key, path in opened.paths.items() if key not in names and path != ("step",)]
    return sorted({_WORDS.get(each, each) for each in left})
