"""Inspection of checkpoints of any kind, and conversion to safetensors, without a model, a process group or a GPU.

The paths of tensors are those of ``_dcp/save.py`` for every kind, such as ``("optimizer", "state", name, key)``.
Between directories and files of ``torch.save``, ``torch.distributed.checkpoint.format_utils`` converts.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from composable_fsdp.checkpoint._archive import check_archive
from composable_fsdp.checkpoint._coordination import dtype_name, said
from composable_fsdp.checkpoint._dcp import directory
from composable_fsdp.checkpoint._dcp.directory import Manifest
from composable_fsdp.checkpoint._dcp.load import read as read_values
from composable_fsdp.checkpoint._dcp.metadata import read_metadata
from composable_fsdp.checkpoint._dcp.save import ContentsPath, key_of
from composable_fsdp.checkpoint._safetensors import (
    INDEX,
    SINGLE,
    Replacement,
    StoredTensors,
    TensorSpec,
    check_directory,
    check_options,
    opened,
)
from composable_fsdp.checkpoint._state_dict.tensors import LocalShard
from composable_fsdp.errors import CheckpointError, ConfigurationError

Tensors = dict[ContentsPath, torch.Tensor]
"""Tensors by path."""


class Kind(str, Enum):
    """The kind of a checkpoint. ``FOLDER`` is a folder of ``DCP`` checkpoints, as ``save`` creates it."""

    FOLDER = "folder"
    DCP = "dcp"
    TORCH = "torch"
    SAFETENSORS = "safetensors"


def kind_of(path: Path) -> Kind:
    """Return the kind of the checkpoint at ``path``. Raise ``CheckpointError`` if there is none."""
    if path.is_dir():
        if (path / directory.MANIFEST).is_file() or (path / directory.METADATA).is_file():
            return Kind.DCP
        if directory.candidates(path):
            return Kind.FOLDER
        if any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
            return Kind.SAFETENSORS
    elif path.name.endswith((".safetensors", ".safetensors.index.json")):
        return Kind.SAFETENSORS
    elif path.is_file():
        return Kind.TORCH
    directory.find(path)  # raises if there is no checkpoint
    return Kind.DCP


@dataclass(frozen=True)
class Source:
    """A checkpoint that is open for reading.

    Args:
        tensors: shape and dtype by path, as tensors of any device. Tied tensors are listed once.
        aliases: further paths of tied tensors, with the path in ``tensors``.
        objects: the paths of values that are not tensors.
        read: returns the tensors at the given paths, on the CPU.
        manifest: the manifest, if ``save`` wrote the checkpoint.
    """

    path: Path
    kind: Kind
    tensors: Tensors
    aliases: Mapping[ContentsPath, ContentsPath]
    objects: Sequence[ContentsPath]
    read: Callable[[Iterable[ContentsPath]], Tensors]
    manifest: Manifest | None = None


def open_source(path: Path) -> Source:
    """Open the checkpoint at ``path``, or the newest one in the folder ``path``.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    match kind_of(path):
        case Kind.SAFETENSORS:
            return _open_safetensors(path)
        case Kind.TORCH:
            return _open_torch(path)
        case _:
            return _open_dcp(directory.find(path))


# -- directories of torch.distributed.checkpoint, with or without our manifest


def _open_dcp(folder: Path) -> Source:
    manifest, problem = directory.read_manifest(folder) if (folder / directory.MANIFEST).exists() else (None, "")
    if problem:
        raise CheckpointError(problem)
    metadata = read_metadata(folder, manifest)
    saved = metadata.state_dict_metadata
    keys = dict(zip(_in_model([_path_of(key, metadata) for key in saved]), saved, strict=True))
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

    return Source(folder, Kind.DCP, tensors, aliases, [at for at in keys if at not in found], read, manifest)


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


def _path_of(key: str, metadata: Metadata) -> ContentsPath:
    """Return the path that DCP recorded for ``key``. Without one, split ``key`` only after ``model.``."""
    noted = (metadata.planner_data or {}).get(key)
    if noted is not None:
        return tuple(noted)
    return tuple(key.split(".", 1)) if key.startswith("model.") else (key,)


def _in_model(paths: list[ContentsPath]) -> list[ContentsPath]:
    """Return ``paths``; if none of them is in a model, values at the top level are the model."""
    if any(path[0] == "model" for path in paths):
        return paths
    return [("model", *path) if len(path) == 1 else path for path in paths]


# -- files of torch.save

_MOST_VALUES, _MOST_DEPTH = 1_000_000, 50
"""The most values of a file, and mappings around one. A mapping may be in itself, or twice in each of many others."""

_MOST_EXPANSION = 10
"""The most bytes of all tensors by those of their file: tensors may share values, and ``expand`` repeats them."""


def _open_torch(path: Path) -> Source:
    """Open a file of a state dict, or of ``{"model": state dict, "optimizer": …, …}``, without reading its tensors."""
    flat = list(islice(_flatten(_load(path)), _MOST_VALUES + 1))
    if len(flat) > _MOST_VALUES or any(len(at) > _MOST_DEPTH for at, _ in flat):
        raise CheckpointError(
            f"{path} has more than {_MOST_VALUES} values, or mappings nested in {_MOST_DEPTH} others."
        )
    values = dict(flat)
    values = dict(zip(_in_model(list(values)), values.values(), strict=True))
    plain = {at: _checked(at, value) for at, value in values.items() if isinstance(value, torch.Tensor)}
    tensors, aliases = _tied({at: ((v.data_ptr(), v.dtype, v.shape, v.stride()), v) for at, v in plain.items()})
    nbytes, most = sum(tensor.nbytes for tensor in tensors.values()), _MOST_EXPANSION * path.stat().st_size
    if nbytes > most:  # strides of 0 make a large tensor of one number
        raise CheckpointError(
            f"{path} has tensors of {nbytes} bytes, more than {_MOST_EXPANSION} times its own: their values overlap. "
            "Save contiguous copies of them."
        )
    objects = [at for at in values if at not in plain]
    return Source(path, Kind.TORCH, tensors, aliases, objects, lambda paths: {at: tensors[at] for at in paths})


def _load(path: Path) -> Mapping[Any, Any]:
    try:
        with path.open("rb") as file:
            check_archive(file)
        value = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is damaged, no checkpoint, or has objects of classes that torch.load(weights_only=True) does not "
            f"admit: {str(error).splitlines()[0]}. If you trust whoever wrote it, load it in Python with "
            "weights_only=False, which can run any code in it, and save the model's state dict as a file of its own."
        ) from error
    except Exception as error:  # damaged bytes may raise anything
        raise CheckpointError(f"{path} is damaged, or no checkpoint: {said(error).splitlines()[0]}") from error
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{path} has a {type(value).__name__} instead of a state dict.")
    others = [key for key in value if not isinstance(key, str)]
    if others:
        raise CheckpointError(f"{path} has no state dict, but a mapping with the key {others[0]!r}, which is no name.")
    return value


def _flatten(value: Any, path: ContentsPath = ()) -> Iterator[tuple[ContentsPath, Any]]:
    """Yield all values in nested mappings, with their paths below ``path``. Extra state of modules stays one object."""
    is_leaf = not isinstance(value, Mapping) or len(path) > _MOST_DEPTH
    if is_leaf or (path[:1] == ("model",) and len(path) > 1):
        yield path, value
        return
    for key, each in value.items():
        yield from _flatten(each, (*path, str(key)))


def _checked(path: ContentsPath, tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(
            f"{key_of(path)} is a {type(tensor).__name__} of layout {tensor.layout}: only plain tensors can be read, "
            "unsharded ones (Full())."
        )
    return tensor.detach()


# -- safetensors


def _open_safetensors(path: Path) -> Source:
    stored = StoredTensors.at(path)
    tensors: Tensors = {}
    for name, found in stored.tensors.items():
        if found.dtype is None:
            raise CheckpointError(f"{found.file}: {name} has the dtype {found.code}, which torch does not have.")
        tensors["model", name] = torch.empty(found.shape, dtype=found.dtype, device="meta")
    aliases: dict[ContentsPath, ContentsPath] = {
        ("model", alias): ("model", name) for alias, name in stored.aliases.items()
    }

    def read(paths: Iterable[ContentsPath]) -> Tensors:
        files = {file: opened(file) for file in dict.fromkeys(found.file for found in stored.tensors.values())}
        return {at: files[stored.tensors[at[1]].file].get_tensor(at[1]) for at in paths}

    return Source(path, Kind.SAFETENSORS, tensors, aliases, (), read)


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
    kind: str
    saved: dict[str, Any]
    tensors: tuple[Tensor, ...]
    optimizer: int
    others: dict[str, int]
    nbytes: int
    problems: tuple[str, ...] = ()


def describe(path: Path, *, verify: bool = False) -> Description:
    """Return a summary of the checkpoint at ``path``. Without ``verify`` only sizes of files are compared.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged; or ``verify``, and its kind has no manifest.
    """
    source = open_source(path)
    manifest = source.manifest
    if verify and source.kind is not Kind.DCP:
        raise CheckpointError(
            f"{path} has no manifest of checksums. 'python -m zipfile -t {path}' tests a file of torch.save; "
            "safetensors have no checksums."
        )
    saved = {} if manifest is None else {k: getattr(manifest, k) for k in ("step", "ranks", "library", "torch")}
    tensors = [_tensor(source, at) for at in (*source.tensors, *source.aliases) if at[0] == "model"]
    others = {at[0]: 0 for at in (*source.tensors, *source.objects) if at[0] != "model"}
    for at, spec in source.tensors.items():
        if at[0] in others:
            others[at[0]] += spec.nbytes
    stateful = {at[:3] for at in (*source.tensors, *source.objects) if at[:2] == ("optimizer", "state")}
    return Description(
        path=str(source.path),
        kind=source.kind.value,
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
    kind: str = Kind.FOLDER.value


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
