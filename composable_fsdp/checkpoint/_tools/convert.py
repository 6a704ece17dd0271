"""Conversion of a checkpoint to another format. It needs neither a model nor a process group.

torch's own converters (``torch.distributed.checkpoint.format_utils``) do not serve: they unpickle any class, write tied
tensors twice, and leave out the manifest, without which a directory has no checksums (``test_checkpoint_of_torch.py``).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element

from composable_fsdp.checkpoint._dcp import contents
from composable_fsdp.checkpoint._dcp.directory import Manifest
from composable_fsdp.checkpoint._dcp.storage import ChecksummingWriter, SavePlanner
from composable_fsdp.checkpoint._safetensors.load_safetensors import INDEX, SINGLE
from composable_fsdp.checkpoint._safetensors.save_safetensors import Replacement, TensorSpec, sync
from composable_fsdp.checkpoint._state_dict.tensors import LocalShard
from composable_fsdp.checkpoint._tools.inspect import verify as verify_files
from composable_fsdp.checkpoint._tools.sources import Kind, Source, Tensors, open_source
from composable_fsdp.errors import CheckpointError, ConfigurationError

__all__ = ["MAX_FILE_BYTES", "convert"]

MAX_FILE_BYTES = 5 * 10**9

_WORDS = {
    "classes": "classes of tensors",
    "model": "extra state of modules",
    "ranks": "extra and random number generators",
}
"""Names for what is left out. The step is not listed: it is saved in another place, or not at all in safetensors."""

_OURS = ("model", "optimizer", "averages", "classes", "communication", "ranks")
"""The first keys of what a directory can have."""


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: Kind,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    model_only: bool = False,
    force: bool = False,
    verify: bool = True,
    weights_only: bool = True,
) -> list[str]:
    """Convert the checkpoint ``source`` to the format ``to``, with all of its tensors in memory.

    The conversion is atomic: an existing target is replaced only once the new one is complete. Tied weights stay tied.
    Arguments are those of the command. A torch file of the model alone is its state dict, otherwise
    ``{"model": ..., "optimizer": ..., ...}``.

    Returns:
        Descriptions of what was left out.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or the target exists.
        ConfigurationError: an argument is invalid.
    """
    given, goal = Path(source), Path(target)
    if to not in _WRITERS:
        raise ConfigurationError(f"a checkpoint can be converted to {', '.join(_WRITERS)}, not to {to.value}.")
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigurationError(f"dtype must be a floating-point one, not {dtype}.")
    if max_file_bytes < 1:
        raise ConfigurationError(f"max_file_bytes must be at least 1, not {max_file_bytes}.")
    opened = open_source(given, weights_only=weights_only)
    _check_target(goal, to, force)
    if goal.exists() and (goal.samefile(opened.path) or goal.samefile(given)):
        raise ConfigurationError(f"{goal} is the source of the conversion. Name another target.")
    problems = verify_files(opened.path).problems if verify and opened.manifest is not None else ()
    if problems:
        raise CheckpointError("\n".join(problems))
    conversion, left_out = _read(opened, to, dtype=dtype, model_only=model_only)
    _WRITERS[to](conversion, goal, max_file_bytes)
    return left_out


@dataclass(frozen=True)
class _Conversion:
    """The tensors and objects to write, the further paths of these tensors, and the manifest of the source."""

    tensors: Tensors
    aliases: Mapping[contents.Path, contents.Path]
    objects: Mapping[contents.Path, Any]
    manifest: Manifest | None


def _read(source: Source, to: Kind, *, dtype: torch.dtype | None, model_only: bool) -> tuple[_Conversion, list[str]]:
    """Return the tensors and objects of ``source`` to write, and descriptions of what is left out."""

    def stays(path: contents.Path) -> bool:
        if path[0] == "model" or (path[0] == "classes" and path[1].startswith("model.") and to is Kind.DCP):
            return True
        return not model_only and to is not Kind.SAFETENSORS and (to is Kind.TORCH or path[0] in (*_OURS, "step"))

    paths = [path for path in source.tensors if stays(path)]
    if not any(path[0] == "model" for path in paths):
        raise CheckpointError(
            f"{source.path} has no model: neither a state dict under the key 'model' nor tensors at the top level. "
            "Save its state dict as a file of its own."
        )
    tensors = source.read(paths)
    for path, value in tensors.items():
        if dtype is not None and path[0] == "model" and value.is_floating_point():
            tensors[path] = value.to(dtype)
    takes_objects = to is not Kind.SAFETENSORS
    objects = {path: source.value(path) for path in source.object_paths if takes_objects and stays(path)}
    aliases = {alias: of for alias, of in source.aliases.items() if stays(alias)}
    left = [path for path in (*source.tensors, *source.object_paths) if path not in tensors and path not in objects]
    left_out = sorted({_WORDS.get(path[0], path[0]) for path in left if path != ("step",)})
    return _Conversion(tensors, aliases, objects, source.manifest), left_out


def _check_target(target: Path, to: Kind, force: bool) -> None:
    if to is Kind.DCP:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise CheckpointError(f"{target} exists already, and --force replaces no directory. Delete it first.")
        return
    if to is Kind.SAFETENSORS:
        if target.suffix == ".safetensors" or (target.exists() and not target.is_dir()):
            raise ConfigurationError(f"{target} must be a directory: there may be several files of safetensors.")
        exists = (target / SINGLE).exists() or (target / INDEX).exists()
    else:
        exists = target.exists()
        if target.is_dir():
            raise ConfigurationError(f"{target} is a directory. Name a file.")
    if exists and not force:
        raise CheckpointError(f"{target} exists already. Pass --force to replace it.")


# -- writers


@contextmanager
def _complete_only(target: Path) -> Iterator[Path]:
    """Yield a path on the disk of ``target``, which becomes it at the end. Output of killed conversions is deleted."""
    path = target.parent / f".{target.name}.incomplete"
    path.parent.mkdir(parents=True, exist_ok=True)
    _delete(path)
    try:
        yield path
        sync(path)
        os.replace(path, target)
    except BaseException:
        _delete(path)
        raise
    sync(target.parent)


def _delete(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)


def _write_dcp(conversion: _Conversion, target: Path, max_file_bytes: int) -> None:
    """Write a directory in the format of ``save``."""
    state = contents.Contents(aliases=dict(conversion.aliases))
    state.parts = {path: LocalShard(tensor) for path, tensor in conversion.tensors.items()}
    values = {tuple(map(str, path)): value for path, value in conversion.objects.items()}  # DCP's paths have indices
    state.objects = {path: value for path, value in values.items() if path != ("step",)}
    step = conversion.objects.get(("step",)) if conversion.manifest is None else conversion.manifest.step
    ranks = {path[1] for path in conversion.objects if path[0] == "ranks"}
    with _complete_only(target) as folder:
        folder.mkdir()
        planner, writer = SavePlanner(state), ChecksummingWriter(folder)
        plans, metadata = planner.create_global_plan([planner.create_local_plan()])
        writer.set_up_storage_writer(is_coordinator=True)
        (plan,) = writer.prepare_global_plan(plans)
        written = writer.write_data(plan, planner)
        written.wait()
        whole = step if type(step) is int else 0
        writer.complete(metadata, [(written.value(), {})], state.aliases, whole, max(len(ranks), 1))


def _write_safetensors(conversion: _Conversion, target: Path, max_file_bytes: int) -> None:
    specs = [TensorSpec(path[1], each.dtype, tuple(each.shape)) for path, each in conversion.tensors.items()]
    aliases = {alias[1]: of[1] for alias, of in conversion.aliases.items()}
    replacement = Replacement.of(target, specs, aliases, max_file_bytes)
    try:
        replacement.begin()
        replacement.write({path[1]: LocalShard(tensor) for path, tensor in conversion.tensors.items()})
        replacement.commit()
    except BaseException:
        replacement.abandon()
        raise


def _write_torch(conversion: _Conversion, target: Path, max_file_bytes: int) -> None:
    tree: dict[str, Any] = {}
    values = conversion.tensors | {alias: conversion.tensors[of] for alias, of in conversion.aliases.items()}
    for path, value in (*values.items(), *conversion.objects.items()):
        set_element(tree, path, value)
    is_model_only = tree.keys() == {"model"}
    if conversion.manifest is not None:
        tree["step"] = conversion.manifest.step
    with _complete_only(target) as file:
        torch.save(tree["model"] if is_model_only else tree, file)


_WRITERS: Mapping[Kind, Callable[[_Conversion, Path, int], None]] = {
    Kind.DCP: _write_dcp,
    Kind.TORCH: _write_torch,
    Kind.SAFETENSORS: _write_safetensors,
}
