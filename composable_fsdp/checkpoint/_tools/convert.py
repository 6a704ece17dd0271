"""Conversion of a checkpoint to another format, block by block. It needs neither a model nor a process group."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from composable_fsdp.checkpoint._coordination.progress import progress_bar, wants_progress
from composable_fsdp.checkpoint._dcp import contents
from composable_fsdp.checkpoint._safetensors.file_layout import INDEX, SINGLE
from composable_fsdp.checkpoint._tools.convert_staging import Conversion
from composable_fsdp.checkpoint._tools.sources import Kind, Source, Spec, kind_of, open_source
from composable_fsdp.checkpoint._tools.to_dcp import recover_interrupted, write_dcp
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
"""Names for what is left out. The step is not listed: it is saved in another place, or not at all in safetensors."""

_WRITERS: Mapping[Kind, Callable[[Conversion, Path, int], None]] = {
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
    """Convert the checkpoint ``source`` to the format ``to``. Only one block at a time is in memory.

    The conversion is atomic: an existing target is replaced only once the new one is complete. Tied weights stay tied.

    Args:
        source: a checkpoint of any kind, or a folder of checkpoints, of which the newest is converted.
        target: for safetensors a directory, in which unrelated files are kept; for DCP a directory; for torch a file.
        to: the format to write.
        dtype: dtype of the model's floating-point tensors; ``None`` keeps theirs. Optimizer state is never converted.
        max_file_bytes: maximum bytes of tensors in one file. Does not apply to ``torch``, which writes one file.
        model_only: leave out everything but the model. safetensors never have anything else. A torch file then is the
            model's state dict, otherwise ``{"model": ..., "optimizer": ..., ...}``.
        force: replace an existing checkpoint.
        verify: verify all files of ``source`` first, with :func:`~composable_fsdp.checkpoint._tools.verify.verify`.
        weights_only: as for ``torch.load``.
        progress: show a progress bar. Default: if stderr is a terminal.

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
    if to is Kind.DCP:
        recover_interrupted(goal)
    opened = open_source(given, weights_only=weights_only)
    _check_target(goal, to, force)
    if goal.exists() and (goal.samefile(opened.path) or goal.samefile(given)):
        raise ConfigurationError(f"{goal} is the source of the conversion. Name another target.")
    problems = verify_files(opened.path, progress=progress).problems if verify else ()
    if problems:
        raise CheckpointError("\n".join(problems))
    conversion, left_out = _plan(opened, to, dtype=dtype, model_only=model_only)
    total = sum(spec.nbytes for spec in conversion.tensors.values())
    with (
        progress_bar(wants_progress(progress), f"converting {opened.path.name}", total) as conversion.done,
        torch.no_grad(),
    ):
        _WRITERS[to](conversion, goal, max_file_bytes)
    return left_out


def _plan(source: Source, to: Kind, *, dtype: torch.dtype | None, model_only: bool) -> tuple[Conversion, list[str]]:
    """Return the tensors and objects of ``source`` to write, and descriptions of what is left out."""

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
    return Conversion(source, tensors, aliases, objects), left_out


def _check_target(target: Path, to: Kind, force: bool) -> None:
    """Raise if ``target`` exists, unless it is a checkpoint of the same kind and ``force`` is set."""
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
            raise ConfigurationError(f"{target} exists and is not a checkpoint of this kind. Name another target.")
    if exists and not force:
        raise CheckpointError(f"{target} exists already. Pass --force to replace it.")
