"""``save``: plan, copy to host memory, write, commit."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.optim import Optimizer

from composable_fsdp.checkpoint._coordination.mismatch import check_arguments
from composable_fsdp.checkpoint._coordination.rank_group import TIMEOUT, PendingSave, RankGroup, meet
from composable_fsdp.checkpoint._dcp.contents import Contents, Contribution, contents_of, merge
from composable_fsdp.checkpoint._dcp.contents import Path as ContentsPath
from composable_fsdp.checkpoint._dcp.directory import FileRecord, PartialCheckpoint, complete
from composable_fsdp.checkpoint._dcp.storage import ChecksummingWriter, SavePlanner
from composable_fsdp.checkpoint._state_dict.ema import ShardedEMA
from composable_fsdp.checkpoint._state_dict.tensors import prepare_for_access
from composable_fsdp.errors import ArgumentTypeError, ConfigurationError

__all__ = ["save"]


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
    timeout: float = TIMEOUT,
) -> PendingSave:
    """Write a new checkpoint ``path/step-00000020``. All ranks of the default process group must call it.

    The save is atomic: if a process is killed or the disk is full, the earlier checkpoints stay valid, including one of
    the same step until the new one is complete. Every rank writes the shards that it holds, and replicated values are
    written once. So values that differ between ranks must be DTensors, or have different names on each rank. The format
    is that of ``torch.distributed.checkpoint``, whose ``load`` can read it too, with a manifest of checksums.

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
    extra = dict(extra or {})
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
    saver = _Save(ranks, Path(path), step, keep_last)
    saver.plan(model, optimizer, averages, extra)
    pending = PendingSave(saver.final, saver.step)
    if asynchronous:
        saver.stage()
        pending.start(saver.write)
    else:
        saver.write()
    return pending


_Writes = tuple[list[WriteResult], Mapping[str, FileRecord]]
"""The write results of one rank, and its files."""


class _Save:
    """One save on one rank. After :meth:`plan`, rank 0 also has ``_partial_checkpoint`` and ``_metadata``."""

    def __init__(self, ranks: RankGroup, path: Path, step: int | None, keep_last: int | None) -> None:
        self._ranks = ranks
        self._path = path
        self._requested_step = step
        self._keep_last = keep_last
        self._metadata: Metadata | None = None
        self._partial_checkpoint: PartialCheckpoint | None = None

    def plan(
        self, model: nn.Module, optimizer: Optimizer | None, averages: ShardedEMA | None, extra: Mapping[str, Any]
    ) -> None:
        """Plan which rank writes what, and create the directory."""

        what = f"saving to {self._path}"
        contents = Contents()

        def contribution() -> Contribution:
            nonlocal contents
            prepare_for_access(model)
            contents = contents_of(model, averages)
            if optimizer is not None:
                contents.add_optimizer(model, optimizer)
            contents.add_rank(model, self._ranks.rank, extra)
            return contents.contribution()

        merged = self._ranks.combine(what, contribution, merge)

        def each() -> tuple[SavePlan, Mapping[ContentsPath, ContentsPath]]:
            contents.settle(merged)
            self._planner = SavePlanner(contents)
            return self._planner.create_local_plan(), contents.aliases

        def central(
            planned: list[tuple[SavePlan, Mapping[ContentsPath, ContentsPath]]],
        ) -> Sequence[tuple[Path, Path, int, SavePlan]]:
            plans, self._metadata = self._planner.create_global_plan([plan for plan, _ in planned])
            self._aliases = {alias: of for _, aliases in planned for alias, of in aliases.items()}
            step = max(complete(self._path), default=-1) + 1 if self._requested_step is None else self._requested_step
            self._partial_checkpoint = directory = PartialCheckpoint(self._path, step)
            plans = ChecksummingWriter(directory.partial).prepare_global_plan(plans)
            return [(directory.final, directory.partial, step, plan) for plan in plans]

        with self._abandon_on_failure():
            reply = self._ranks.exchange(what, each, central)
        self.final, self._partial, self.step, self._plan = reply

    def stage(self) -> None:
        """Copy the tensors that this rank writes to host memory."""
        with self._abandon_on_failure():
            self._ranks.agree(f"saving {self.final}", lambda: self._planner.stage(self._plan))

    def write(self) -> None:
        """Write this rank's files, then commit the checkpoint on rank 0."""
        writer = ChecksummingWriter(self._partial)
        writer.set_up_storage_writer(self._ranks.rank == 0)

        def each() -> _Writes:
            written = writer.write_data(self._plan, self._planner)
            written.wait()
            return written.value(), writer.records

        def finish(written: list[_Writes]) -> None:
            assert self._partial_checkpoint is not None
            assert self._metadata is not None
            writer.complete(self._metadata, written, self._aliases, self.step, self._ranks.size)
            self._partial_checkpoint.commit(self._keep_last)

        with self._abandon_on_failure():
            self._ranks.combine(f"saving {self.final}", each, finish)

    @contextmanager
    def _abandon_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self._partial_checkpoint is not None:
                self._partial_checkpoint.abandon()
            raise
