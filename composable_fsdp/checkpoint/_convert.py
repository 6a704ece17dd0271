"""Inspection of checkpoints, and conversion to safetensors, without a model, a process group or a GPU."""

from __future__ import annotations

import os
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
from composable_fsdp.checkpoint._safetensors import INDEX, SINGLE, save_safetensors
from composable_fsdp.checkpoint._state_dict.tensors import LocalShard
from composable_fsdp.errors import CheckpointError, ConfigurationError


def _open(source: str | os.PathLike[str], *, contents: bool) -> tuple[Path, Manifest | None, Metadata]:
    """Return the checkpoint at ``source``, or the newest one in that folder, once its files have been checked."""
    folder = directory.checkpoints_at(source)[0]
    manifest, problem = directory.read_manifest(folder)
    if manifest is not None:
        problem = "\n".join(directory.check_files(folder, manifest.files, contents=contents))
    if problem and (manifest is not None or folder != Path(source) or directory.has_file(folder / directory.MANIFEST)):
        raise CheckpointError(problem)
    return folder, manifest, with_plain_names(read_metadata(folder, manifest))


def describe(source: str | os.PathLike[str], *, verify: bool = False) -> dict[str, Any]:
    """Return what ``checkpoint inspect`` prints as JSON. What the manifest has is ``None`` without one.

    Checksums are compared with ``verify``, otherwise sizes of files only.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it has no manifest to verify it with.
    """
    folder, manifest, metadata = _open(source, contents=verify)
    if verify and manifest is None:
        raise CheckpointError(f"{folder / directory.MANIFEST} is missing.")
    tensors = [
        {"name": key, "shape": list(saved.size), "dtype": dtype_name(saved.properties.dtype)}
        for key, saved in metadata.state_dict_metadata.items()
        if isinstance(saved, TensorStorageMetadata)
    ]
    files = None if manifest is None else {name: record.bytes for name, record in manifest.files.items()}
    noted = {name: getattr(manifest, name, None) for name in ("step", "ranks", "library", "torch")}
    return {"path": str(folder), **noted, "files": files, "tensors": tensors}


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
) -> None:
    """Write the model of the checkpoint ``source`` to safetensors in ``target``, with all of its tensors in memory.

    The source is one of ``save`` or of ``torch.distributed.checkpoint``, or a folder of them, of which the newest is
    converted. The conversion is atomic. Tied weights stay tied. Arguments are those of the command.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or the target cannot be written.
        ConfigurationError: an argument is invalid, or the target has a model already.
    """
    if any(os.path.lexists(os.path.join(target, name)) for name in (SINGLE, INDEX)):
        raise ConfigurationError(f"{os.fspath(target)} has a model already: remove it first, or name another target.")
    folder, _, metadata = _open(source, contents=True)
    values: dict[str, torch.Tensor] = {}
    written: dict[object, torch.Tensor] = {}
    for key, saved in metadata.state_dict_metadata.items():
        if key.startswith("model.") and isinstance(saved, TensorStorageMetadata):
            if f"classes.{key}" in metadata.state_dict_metadata:
                raise CheckpointError(
                    f"{key} is a tensor of a class with inner tensors. Load the checkpoint into its model, and call "
                    "save_safetensors."
                )
            # The positions in files are equal for all names of a tensor that was written once.
            places = [metadata.storage_data[MetadataIndex(key, chunk.offsets)] for chunk in saved.chunks]
            memory = tuple((place.relative_path, place.offset) for place in places)
            empty = torch.empty(saved.size, dtype=saved.properties.dtype)
            values[key] = written.setdefault(memory, empty) if empty.numel() else empty
    if not values:
        raise CheckpointError(f"{folder} has no model under the key 'model', and no tensors at the top level.")
    own = {id(value): key for key, value in reversed(values.items())}
    read(folder, metadata, {key: LocalShard(values[key]) for key in own.values()})
    model = _Values({key.removeprefix("model."): value for key, value in values.items()})
    save_safetensors(model, target, dtype=dtype)
