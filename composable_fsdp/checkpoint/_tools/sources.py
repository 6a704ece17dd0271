"""Checkpoints of any kind, read as a whole or verified, without a model, a process group or a GPU.

The paths of tensors are those of :mod:`~composable_fsdp.checkpoint._dcp.contents` for every kind: ``("model", name)``,
or ``("optimizer", "state", name, key)``.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from composable_fsdp.checkpoint._dcp import contents
from composable_fsdp.checkpoint._dcp.directory import MANIFEST, METADATA, Manifest, candidates, find
from composable_fsdp.checkpoint._dcp.load import read_objects
from composable_fsdp.checkpoint._dcp.storage import Blocks, read_metadata
from composable_fsdp.checkpoint._dcp.storage import read as read_values
from composable_fsdp.checkpoint._safetensors.load_safetensors import StoredTensors, opened
from composable_fsdp.errors import CheckpointError

__all__ = ["Kind", "Source", "Tensors", "kind_of", "open_source"]

Tensors = dict[contents.Path, torch.Tensor]
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


@dataclass(frozen=True)
class Source:
    """A checkpoint that is open for reading.

    Args:
        tensors: shape and dtype by path, as tensors of any device. Tied tensors are listed once.
        aliases: further paths of tied tensors, with the path in ``tensors``.
        object_paths: the paths of values that are not tensors.
        read: returns the values of the tensors at the given paths, on the CPU.
        value: returns the value at one of ``object_paths``. It raises ``CheckpointError`` if the value has classes that
            are not admitted.
        manifest: the manifest, if ``save`` or ``convert`` wrote the checkpoint.
    """

    path: Path
    kind: Kind
    tensors: Tensors
    aliases: Mapping[contents.Path, contents.Path]
    object_paths: Iterable[contents.Path]
    read: Callable[[Iterable[contents.Path]], Tensors]
    value: Callable[[contents.Path], Any]
    manifest: Manifest | None = None


def open_source(path: Path, *, weights_only: bool = True) -> Source:
    """Open the checkpoint at ``path``, or the newest one in the folder ``path``. For the option see ``torch.load``.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    match kind_of(path):
        case Kind.SAFETENSORS:
            return _open_safetensors(path)
        case Kind.TORCH:
            return _open_torch(path, weights_only)
        case _:
            return _open_dcp(find(path), weights_only)


# -- directories of torch.distributed.checkpoint, with or without our manifest


def _open_dcp(folder: Path, weights_only: bool) -> Source:
    metadata = read_metadata(folder)
    saved = metadata.state_dict_metadata
    keys = dict(zip(_in_model([_path_of(key, metadata) for key in saved]), saved, strict=True))
    tensors: Tensors = {}
    aliases: dict[contents.Path, contents.Path] = {}
    first: dict[object, contents.Path] = {}
    for at, key in keys.items():
        tensor = saved[key]
        if isinstance(tensor, TensorStorageMetadata):
            # The positions in files are equal for all names of a tensor that was written once.
            infos = [metadata.storage_data[MetadataIndex(key, chunk.offsets)] for chunk in tensor.chunks]
            same = first.setdefault(tuple((info.relative_path, info.offset) for info in infos), at)
            if same != at:
                aliases[at] = same
            else:
                tensors[at] = torch.empty(tensor.size, dtype=tensor.properties.dtype, device="meta")

    def read(paths: Iterable[contents.Path]) -> Tensors:
        values = {at: torch.empty_like(tensors[at], device="cpu") for at in paths}
        blocks = {keys[at]: Blocks(v.shape, {(0,) * v.ndim: v}) for at, v in values.items() if v.numel()}
        read_values(folder, metadata, blocks)
        return values

    def value(at: contents.Path) -> Any:
        return read_objects(folder, metadata, [keys[at]], weights_only=weights_only)[keys[at]]

    objects = [at for at in keys if at not in tensors and at not in aliases]
    manifest = Manifest.read(folder) if (folder / MANIFEST).exists() else None
    return Source(folder, Kind.DCP, tensors, aliases, objects, read, value, manifest)


def _path_of(key: str, metadata: Metadata) -> contents.Path:
    """Return the path that DCP recorded for ``key``. Without one, split ``key`` only after ``model.``."""
    noted = (metadata.planner_data or {}).get(key)
    if noted is not None:
        return tuple(noted)
    return tuple(key.split(".", 1)) if key.startswith("model.") else (key,)


def _in_model(paths: list[contents.Path]) -> list[contents.Path]:
    """Return ``paths``; if none of them is in a model, values at the top level are the model."""
    if any(path[0] == "model" for path in paths):
        return paths
    return [("model", *path) if len(path) == 1 else path for path in paths]


# -- files of torch.save


def _open_torch(path: Path, weights_only: bool) -> Source:
    """Open a file of a state dict, or of ``{"model": state dict, "optimizer": …, …}``, without reading its tensors."""
    values = dict(_flatten(_load(path, weights_only)))
    values = dict(zip(_in_model(list(values)), values.values(), strict=True))
    objects = {at: value for at, value in values.items() if not isinstance(value, torch.Tensor)}
    tensors: Tensors = {}
    aliases: dict[contents.Path, contents.Path] = {}
    first: dict[object, contents.Path] = {}
    for at in (at for at in values if at not in objects):
        value = _checked(at, values[at])
        same = first.setdefault((at[0], value.data_ptr(), value.dtype, value.shape, value.stride()), at)
        if value.numel() and same != at:
            aliases[at] = same
        else:
            tensors[at] = value

    def read(paths: Iterable[contents.Path]) -> Tensors:
        return {at: tensors[at] for at in paths}

    return Source(path, Kind.TORCH, tensors, aliases, list(objects), read, objects.__getitem__)


def _load(path: Path, weights_only: bool) -> Mapping[Any, Any]:
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


_DEPTHS = {"model": 2, "optimizer": 4, "averages": 3, "classes": 2, "communication": 3, "ranks": 3}


def _flatten(value: Any, path: contents.Path = ()) -> Iterator[tuple[contents.Path, Any]]:
    """Yield all values in nested mappings, with their paths below ``path``.

    A mapping at a path that our checkpoints do not have stays one object unless it contains tensors.

    Raises:
        CheckpointError: an optimizer's state is by number.
    """
    if path == ("optimizer",) and any(isinstance(key, int) for key in value.get("state", ())):
        raise CheckpointError(
            "the optimizer's state is by number, and only the model says which parameters these are. Save the model's "
            "state dict alone, or load the file and save what rekey_optimizer_state_dict makes of the state."
        )
    inside = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    if path and inside:
        depth = _DEPTHS.get(path[0])
        inside = len(path) < depth if depth else any(isinstance(each, torch.Tensor) for each in value.values())
    if not inside:
        yield path, value
        return
    for key, each in value.items():
        yield from _flatten(each, (*path, key))


def _checked(path: contents.Path, tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(
            f"{'.'.join(path)} is a {type(tensor).__name__} of layout {tensor.layout}: only plain tensors can be read, "
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
    aliases: dict[contents.Path, contents.Path] = {
        ("model", alias): ("model", name) for alias, name in stored.aliases.items()
    }

    def read(paths: Iterable[contents.Path]) -> Tensors:
        files = {file: opened(file) for file in {found.file for found in stored.tensors.values()}}
        return {at: files[stored.tensors[at[1]].file].get_tensor(at[1]) for at in paths}

    no_values: dict[contents.Path, Any] = {}
    return Source(path, Kind.SAFETENSORS, tensors, aliases, (), read, no_values.__getitem__)
