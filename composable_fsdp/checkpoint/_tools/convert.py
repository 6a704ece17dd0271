"""From a checkpoint of one kind to one of another, tensor by tensor: neither model nor process group is needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from composable_fsdp.checkpoint._coordination.progress import progress_bar, wants_progress
from composable_fsdp.checkpoint._dcp import contents
from composable_fsdp.checkpoint._safetensors.file_layout import INDEX, SINGLE
from composable_fsdp.checkpoint._tools.convert_staging import Work
from composable_fsdp.checkpoint._tools.sources import Kind, Source, Spec, kind_of, open_source
from composable_fsdp.checkpoint._tools.to_dcp import tidy, write_dcp
from composable_fsdp.checkpoint._tools.to_files import write_safetensors, write_torch
from composable_fsdp.checkpoint._tools.verify import verify as verify_files
from composable_fsdp.errors import CheckpointError, ConfigurationError

__all__ = ["MAX_FILE_BYTES", "convert"]

MAX_FILE_BYTES = 5 * 10**9

_WORDS = {
    "classes": "classes of tensors",
    "model": "extra state of modules",
    "ranks": "extra and random number generators",
}
"""For what is left out. The step, which has its own place in each kind but safetensors, goes without saying."""

_WRITERS: Mapping[Kind, Callable[[Work, Path, int], None]] = {
    Kind.DCP: write_dcp,
    Kind.TORCH: write_torch,
    Kind.SAFETENSORS: write_safetensors,
}


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
    progress: bool | None = None,
) -> list[str]:
    """Writes what ``source`` has as a checkpoint of another kind, or of the same. Holds one block at a time in memory.

    The target is complete or not there, and what it replaces stays until then. Tied weights stay tied.

    Args:
        source: a checkpoint of any kind; of a folder of them the newest.
        target: for safetensors a directory, in which other files stay; for DCP a directory; for torch a file.
        to: which kind.
        dtype: of the floating-point tensors of the model; their own if ``None``. Optimizers keep theirs.
        max_file_bytes: that the tensors of one file may have, but for ``torch``, which has one file.
        model_only: leave out all but the model. safetensors have nothing else. A torch file then is the model's state
            dict, otherwise it is ``{"model": ..., "optimizer": ..., ...}``.
        force: replace a checkpoint that is there.
        verify: read all files of ``source`` first, as :func:`~composable_fsdp.checkpoint._tools.verify.verify` does.
        weights_only: as for ``torch.load``.
        progress: show a bar. If left out, where stderr is a terminal.

    Returns:
        What was left out, in words.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or the target is in use.
        ConfigurationError: an argument makes no sense.
    """
    given, goal = Path(source), Path(target)
    if to not in _WRITERS:
        raise ConfigurationError(f"a checkpoint can be converted to {', '.join(_WRITERS)}, not to {to.value}.")
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigurationError(f"dtype must be a floating-point one, not {dtype}.")
    if max_file_bytes < 1:
        raise ConfigurationError(f"max_file_bytes must be at least 1, not {max_file_bytes}.")
    if to is Kind.DCP:
        tidy(goal)
    opened = open_source(given, weights_only=weights_only)
    _check_target(goal, to, force)
    if goal.exists() and (goal.samefile(opened.path) or goal.samefile(given)):
        raise ConfigurationError(f"{goal} is what is to be converted. Name another target.")
    problems = verify_files(opened.path, progress=progress).problems if verify else ()
    if problems:
        raise CheckpointError("\n".join(problems))
    work, left_out = _work(opened, to, dtype=dtype, model_only=model_only)
    total = sum(spec.nbytes for spec in work.tensors.values())
    with progress_bar(wants_progress(progress), f"converting {opened.path.name}", total) as work.done, torch.no_grad():
        _WRITERS[to](work, goal, max_file_bytes)
    return left_out


def _work(source: Source, to: Kind, *, dtype: torch.dtype | None, model_only: bool) -> tuple[Work, list[str]]:
    """What of ``source`` is to be written, and what is not."""

    def stays(path: contents.Path) -> bool:
        is_record = path[0] == "classes" and path[1].startswith("model.") and to is Kind.DCP
        return path[0] == "model" or is_record or not (model_only or to is Kind.SAFETENSORS)

    def spec(path: contents.Path, own: Spec) -> Spec:
        converts = dtype is not None and path[0] == "model" and own.dtype.is_floating_point
        return Spec(own.shape, dtype) if converts and dtype else own

    tensors = {path: spec(path, own) for path, own in source.tensors.items() if stays(path)}
    if not any(path[0] == "model" for path in tensors):
        raise CheckpointError(f"{source.path} has no model.")
    takes_objects = to is not Kind.SAFETENSORS
    objects = {p: source.value(p) for p in source.object_paths if takes_objects and stays(p)}
    aliases = {alias: of for alias, of in source.aliases.items() if stays(alias)}
    left = [path for path in (*source.tensors, *source.object_paths) if path not in tensors and path not in objects]
    left_out = sorted({_WORDS.get(path[0], path[0]) for path in left if path != ("step",)})
    return Work(source, tensors, aliases, objects), left_out


def _check_target(target: Path, to: Kind, force: bool) -> None:
    """Raises if anything but what ``force`` admits to replace is there."""
    if to is Kind.SAFETENSORS:
        if target.suffix == ".safetensors" or (target.exists() and not target.is_dir()):
            raise ConfigurationError(f"{target} must be a directory: there may be several files of safetensors.")
        exists = (target / SINGLE).exists() or (target / INDEX).exists()
    elif to is Kind.TORCH:
        exists = target.exists()
        if target.is_dir():
            raise ConfigurationError(f"{target} is a directory. Name a file.")
    else:
        exists = target.exists() and not (target.is_dir() and not any(target.iterdir()))
        if exists and not (target.is_dir() and kind_of(target) is Kind.DCP):
            raise ConfigurationError(f"{target} is there, and no checkpoint of this kind. Name another target.")
    if exists and not force:
        raise CheckpointError(f"{target} exists already. Pass --force to replace it.")
