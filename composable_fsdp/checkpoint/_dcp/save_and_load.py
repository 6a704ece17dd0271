"""The public functions ``save`` and ``load`` for checkpoints on disk."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from composable_fsdp.checkpoint._coordination.arguments import check_arguments
from composable_fsdp.checkpoint._coordination.pending_save import PendingSave
from composable_fsdp.checkpoint._coordination.progress import wants_progress
from composable_fsdp.checkpoint._coordination.rank_group import TIMEOUT, meet
from composable_fsdp.checkpoint._dcp.load_directory import CheckpointLoader
from composable_fsdp.checkpoint._dcp.save_directory import CheckpointSaver
from composable_fsdp.checkpoint._state_dict.ema import ShardedEMA
from composable_fsdp.errors import ArgumentTypeError, ConfigurationError

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
    """Write a new checkpoint ``path/step-00000020``. All ranks of the default process group must call it.

    The save is atomic: if a process is killed or the disk is full, the earlier checkpoints stay valid, including one of
    the same step until the new one is complete. Every rank writes the shards that it holds, and replicated values are
    written once. So values that differ between ranks must be DTensors, or have different names on each rank. Plain
    optimizer state counts as a DTensor if on every rank it is the rank's shard of one. The format is that of
    ``torch.distributed.checkpoint``, whose ``load`` can read it too, with an additional manifest of checksums.

    A checkpoint contains parameters, buffers, extra states of modules, optimizer state by parameter name, each rank's
    random number generators, and the state of codecs with error feedback.

    Args:
        path: a folder of checkpoints that all ranks can access. Only one job at a time may write to it.
        model: sharded or not.
        optimizer: over parameters of ``model``.
        extra: further state of this rank, such as the position in the data or the state of a scheduler. Use numbers,
            strings, lists, dicts and tensors; for other classes ``load`` needs ``weights_only=False``.
        averages: moving averages of ``model``, from :func:`~composable_fsdp.sharded_ema`.
        step: step of the checkpoint. Default: ``extra["step"]`` if that is an int, else one more than the newest step.
        keep_last: number of checkpoints to keep. Once this one is complete, all but the highest steps are deleted; this
            one is always kept.
        asynchronous: copy to host memory and write in a thread, so that training waits only for the copy. The next save
            or load waits for the thread, and so does the exit of the interpreter.
        progress: show a progress bar on rank 0. Default: if stderr is a terminal and the save is not ``asynchronous``.
        timeout: seconds that ranks wait for each other, here and in each exchange.

    Returns:
        The path of the checkpoint, with ``wait()``. The checkpoint is complete unless ``asynchronous``.

    Raises:
        CheckpointError: writing failed, ranks are missing, an earlier asynchronous save failed, or plain optimizer
            state of a DTensor differs between ranks. All ranks raise the same error.
        ConfigurationError: an argument is invalid.
    """
    check_arguments("save(path, model, optimizer, extra)", path, model, optimizer)
    if extra is not None and not isinstance(extra, Mapping):
        raise ArgumentTypeError(
            f"extra must be a dict, not {type(extra).__name__}. Call save(path, model, optimizer, extra)."
        )
    extra, show = dict(extra or {}), wants_progress(False if progress is None and asynchronous else progress)
    if step is None and type(extra.get("step")) is int:
        step = extra["step"]
    if step is None and isinstance(extra.get("step"), str) and extra["step"].isdigit():
        raise ArgumentTypeError(f"extra['step'] must be an int, not {extra['step']!r}. Or pass step= beside it.")
    if keep_last is not None and keep_last < 1:
        raise ConfigurationError(f"keep_last must be at least 1, not {keep_last}: the new checkpoint is one.")
    if step is not None and not hasattr(step, "__index__"):
        raise ArgumentTypeError(f"step must be an int, not {step!r}.")
    if step is not None and (step := operator.index(step)) < 0:
        raise ConfigurationError(f"step must not be negative, but is {step}.")
    ranks = meet(f"save({os.fspath(path)!r}, step={step})", timeout)
    saver = CheckpointSaver(ranks, Path(path), step, keep_last)
    saver.plan(model, optimizer, averages, extra)
    pending = PendingSave(saver.final, saver.step)
    if asynchronous:
        saver.stage()
        pending.start(lambda: saver.write(show))
    else:
        saver.write(show)
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
    """Load a checkpoint into ``model`` and ``optimizer``, on any mesh and any number of ranks.

    Each rank reads directly into its shards. Optimizer state is allocated as the checkpoint describes it and passed to
    ``optimizer.load_state_dict``. An optimizer that has not stepped yet needs no step first, unless it keeps local
    shards as plain tensors, which the checkpoint does not show.

    Everything is checked before anything is changed: if a file is damaged or does not fit, model and optimizer stay as
    they are. Damage can be found during reading only if no checksums were compared, with ``verify=False`` or without a
    manifest; the error then says that the model is loaded in part.

    Random number generators and the state of error-feedback codecs belong to single ranks. They are restored only if
    the number of ranks is that of the save, and are unchanged otherwise.

    Args:
        path: a checkpoint, or a folder of them, of which the newest is loaded. Also one that
            ``torch.distributed.checkpoint`` wrote of ``{"model": ..., "optimizer": ...}``. That has no manifest, so it
            cannot be verified, which is logged.
        model: sharded or not.
        optimizer: over parameters of ``model``. Its groups may be in another order than when they were saved.
        averages: moving averages of ``model`` to load. Default: those of the checkpoint are ignored.
        strict: raise on any difference between the checkpoint and the state to load, including optimizer settings that
            have defaults and are missing in the checkpoint. Otherwise what both have is loaded, converted to the
            model's dtypes, and the differences are logged; a different shape or tensor class is always an error.
        verify: compare checksums; otherwise only the presence and sizes of files. Each file is read by one rank.
        fallback: if checkpoints in the folder ``path`` are damaged, load the newest intact one and log the damage.
            Training since then is lost. Without it, a damaged newest checkpoint is an error that names the newest
            intact one. All ranks decide together and each checks a share of the files, from the newest checkpoint to
            the first intact one. With ``verify=False`` only missing files and wrong sizes are detected.
        restore_rng: restore the random number generators.
        weights_only: admit only the classes that ``torch.load(weights_only=True)`` admits, so that no code in the
            checkpoint can run.
        progress: show a progress bar on rank 0. Default: if stderr is a terminal.
        timeout: seconds that ranks wait for each other, here and in each exchange.

    Returns:
        The ``extra`` that this rank passed to ``save``, or that of rank 0 if the number of ranks has changed.

    Raises:
        CheckpointError: there is no checkpoint; it is damaged, of a newer format, or of another model; ranks are
            missing; or an earlier asynchronous save failed. All ranks raise the same error, which names the file or
            lists the differences.
    """
    check_arguments("load(path, model, optimizer)", path, model, optimizer)
    show = wants_progress(progress)
    ranks = meet(f"load({os.fspath(path)!r})", timeout)
    loader = CheckpointLoader(ranks, Path(path), contents=verify, fallback=fallback, show=show)
    loader.prepare(model, optimizer, averages, strict=strict, weights_only=weights_only)
    loader.read()
    if restore_rng:
        loader.restore_random_state()
    return loader.extra
