"""Checkpoints on disk: ``save`` and ``load``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from composable_fsdp.checkpoint._coordination.pending_save import PendingSave
from composable_fsdp.checkpoint._coordination.progress import wants_progress
from composable_fsdp.checkpoint._coordination.rank_group import TIMEOUT, meet
from composable_fsdp.checkpoint._dcp.load_directory import Loading
from composable_fsdp.checkpoint._dcp.save_directory import Saving
from composable_fsdp.checkpoint._state_dict.ema import ShardedEMA
from composable_fsdp.errors import ConfigurationError

__all__ = ["load", "save"]


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    averages: ShardedEMA | None = None,
    step: int | None = None,
    keep_last: int | None = None,
    asynchronous: bool = False,
    progress: bool | None = None,
    timeout: float = TIMEOUT,
) -> PendingSave:
    """Writes a new checkpoint ``path/step-00000020``. All ranks of the default process group must call it.

    It is complete or not there: whenever processes are killed or the disk is full, the earlier ones can be loaded, and
    so can an earlier one of the same step until the new one is complete. Every rank writes what it holds, and of copies
    one rank each: what differs between ranks must be a DTensor, or have another name on each. Plain state of
    an optimizer counts as a DTensor where it is every rank's shard of one. The format is that of
    ``torch.distributed.checkpoint``, whose ``load`` can read it too, with a manifest of checksums.

    Besides parameters, buffers, extra states of modules and the state of the optimizer, by parameter names, a
    checkpoint has each rank's random number generators and what codecs with error feedback keep.

    Args:
        path: a folder of checkpoints, which all ranks see. One job at a time may write to it.
        model: sharded or not.
        optimizer: over parameters of ``model``.
        extra: what else training goes on from, such as the position in the data or the state of a scheduler: each
            rank's own. Of numbers, texts, lists, dicts and tensors, or ``load`` needs ``weights_only=False``.
        averages: of ``model``, from :func:`~composable_fsdp.sharded_ema`.
        step: of the checkpoint; if left out ``extra["step"]`` where that is an int, else one more than the newest.
        keep_last: delete all but so many of the highest steps once this one is complete, which stays in any case.
        asynchronous: copy to host memory and write in a thread, so that only the copying holds up training. The next
            save or load waits for it, and so does the end of the interpreter.
        progress: show a bar on rank 0. If left out, where stderr is a terminal, unless ``asynchronous``.
        timeout: seconds that ranks wait for each other, here and wherever they exchange what they have.

    Returns:
        The path of the checkpoint, with ``wait()``; complete already unless ``asynchronous``.

    Raises:
        CheckpointError: it could not be written, or ranks are missing, or an earlier asynchronous save failed. The same
            on all ranks. Or ranks have different values of what is plain optimizer state for a DTensor.
        ConfigurationError: arguments that make no sense.
    """
    extra, show = dict(extra or {}), wants_progress(False if progress is None and asynchronous else progress)
    if step is None and type(extra.get("step")) is int:
        step = extra["step"]
    if keep_last is not None and keep_last < 1:
        raise ConfigurationError(f"keep_last must be at least 1, not {keep_last}: the new checkpoint is one.")
    if step is not None and step < 0:
        raise ConfigurationError(f"step must not be negative, but is {step}.")
    ranks = meet(f"save({os.fspath(path)!r}, step={step})", timeout)
    saving = Saving(ranks, Path(path), step, keep_last)
    saving.plan(model, optimizer, averages, extra)
    pending = PendingSave(saving.final, saving.step)
    if asynchronous:
        saving.stage()
        pending.start(lambda: saving.write(show))
    else:
        saving.write(show)
    return pending


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    averages: ShardedEMA | None = None,
    strict: bool = True,
    verify: bool = True,
    fallback: bool = False,
    restore_rng: bool = True,
    weights_only: bool = True,
    progress: bool | None = None,
    timeout: float = TIMEOUT,
) -> dict[str, Any]:
    """Loads a checkpoint into ``model`` and ``optimizer``, on any mesh and any number of ranks.

    Each rank reads its part straight into its shards. The state of the optimizer is allocated as the checkpoint has it,
    and goes through ``optimizer.load_state_dict``; an optimizer that never stepped needs no step first, unless it keeps
    local shards as plain tensors, of which nothing else tells.

    Everything is checked before anything is changed: if a file is damaged or does not fit, model and optimizer are what
    they were. Only what no checksum was compared for, by ``verify=False`` or without a manifest, can turn out to be
    damaged while it is read; the error says then that the model is loaded in part.

    Random number generators, and what codecs with error feedback keep, are about single ranks. They are restored on as
    many ranks as saved them; on others they are left as they are.

    Args:
        path: a checkpoint, or a folder of them of which the newest one is loaded. Also one that
            ``torch.distributed.checkpoint`` wrote of ``{"model": ..., "optimizer": ...}``: without a manifest,
            there is nothing to verify then, which is logged.
        model: sharded or not.
        optimizer: over parameters of ``model``, which may be grouped in another order than when they were saved.
        averages: to be filled too; of ``model``. Without them those of the checkpoint are left alone.
        strict: refuse any difference between the checkpoint and what is to be loaded, also settings that the optimizer
            has defaults for and the saved one, of another class perhaps, lacks. Otherwise what is in both is loaded,
            in the model's dtypes, and the differences are logged; another shape is refused all the same.
        verify: compare checksums; otherwise only whether files are there, and their sizes. Each file is read by one
            of the ranks for that.
        fallback: if checkpoints of the folder ``path`` are damaged, load the newest one that is intact, with a warning
            that says what is damaged. What was trained since then is lost. Without it that is an error, which says
            which one is intact. All ranks decide together, and each checks a share of the files; every checkpoint from
            the newest to the first intact one is read for that. ``verify=False`` sees only what is missing or of
            another size.
        restore_rng: restore the random number generators.
        weights_only: admit only what ``torch.load(weights_only=True)`` does: no code in the checkpoint can run then.
        progress: show a bar on rank 0. If left out, where stderr is a terminal.
        timeout: seconds that ranks wait for each other, here and wherever they exchange what they have.

    Returns:
        What this rank gave as ``extra`` to ``save``; what rank 0 gave, if the number of ranks is another now.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, newer than this library, or of another model, or ranks
            are missing, or an earlier asynchronous save failed. The same on all ranks. Names the file, or lists the
            differences.
    """
    show = wants_progress(progress)
    ranks = meet(f"load({os.fspath(path)!r})", timeout)
    loading = Loading(ranks, Path(path), contents=verify, fallback=fallback, show=show)
    loading.prepare(model, optimizer, averages, strict=strict, weights_only=weights_only)
    loading.read()
    if restore_rng:
        loading.restore_random_state()
    return loading.extra
