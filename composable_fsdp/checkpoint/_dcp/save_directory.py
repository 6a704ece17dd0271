"""The steps of one save on one rank: plan, copy to host memory, write, commit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.optim import Optimizer

from composable_fsdp.checkpoint._coordination.progress import progress_bar
from composable_fsdp.checkpoint._coordination.rank_group import RankGroup
from composable_fsdp.checkpoint._dcp.contents import (
    Contents,
    OptimizerEntries,
    check_replicated,
    contents_of,
    merge,
    optimizer_entries,
)
from composable_fsdp.checkpoint._dcp.contents import Path as ContentsPath
from composable_fsdp.checkpoint._dcp.directory import PartialCheckpoint, complete
from composable_fsdp.checkpoint._dcp.filesystem import ChecksummingWriter
from composable_fsdp.checkpoint._dcp.manifest import FileRecord
from composable_fsdp.checkpoint._dcp.planner import SavePlanner
from composable_fsdp.checkpoint._state_dict import inner_tensors
from composable_fsdp.checkpoint._state_dict.ema import ShardedEMA
from composable_fsdp.checkpoint._state_dict.names import prepare_for_access

__all__ = ["CheckpointSaver"]


@dataclass(frozen=True)
class _RankPlan:
    """The plan of one rank."""

    plan: SavePlan
    aliases: Mapping[ContentsPath, ContentsPath]
    replicated: Mapping[str, int]


_Writes = tuple[list[WriteResult], Mapping[str, FileRecord]]
"""The write results of one rank, and its files."""


class CheckpointSaver:
    """One save on one rank. After :meth:`plan`, rank 0 also has ``_partial_checkpoint`` and ``_metadata``.

    Args:
        ranks: the ranks that save.
        path: the folder of checkpoints.
        step: step of this checkpoint; ``None`` for one more than the newest.
        keep_last: number of checkpoints to keep; ``None`` for all.
    """

    def __init__(self, ranks: RankGroup, path: Path, step: int | None, keep_last: int | None) -> None:
        self._ranks = ranks
        self._path = path
        self._requested_step = step
        self._keep_last = keep_last
        self._aliases: dict[ContentsPath, ContentsPath] = {}
        self._metadata: Metadata | None = None
        self._partial_checkpoint: PartialCheckpoint | None = None

    def plan(
        self, model: nn.Module, optimizer: Optimizer | None, averages: ShardedEMA | None, extra: Mapping[str, Any]
    ) -> None:
        """Plan which rank writes what, and create the directory."""

        what = f"saving to {self._path}"

        def entries() -> OptimizerEntries:
            prepare_for_access(model)
            return optimizer_entries(model, optimizer)

        merged = self._ranks.combine(what, entries, merge)
        contents = Contents()

        def contributions() -> Mapping[str, inner_tensors.InnerContribution]:
            nonlocal contents
            contents = contents_of(model, optimizer, averages, extra, self._ranks.rank, merged)
            return contents.inner_contributions()

        inner_merged = self._ranks.combine(what, contributions, inner_tensors.agreed)

        def each() -> _RankPlan:
            contents.expand(inner_merged)
            self._planner = SavePlanner(contents)
            return _RankPlan(self._planner.create_local_plan(), contents.aliases, contents.replicated)

        def central(planned: list[_RankPlan]) -> Sequence[tuple[Path, Path, int, SavePlan]]:
            check_replicated([each.replicated for each in planned])
            plans, self._metadata = self._planner.create_global_plan([each.plan for each in planned])
            for each in planned:
                self._aliases |= each.aliases
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

    def write(self, show: bool) -> None:
        """Write this rank's files, then commit the checkpoint on rank 0."""
        writer = ChecksummingWriter(self._partial)
        writer.set_up_storage_writer(self._ranks.rank == 0)

        def each() -> _Writes:
            total = self._planner.nbytes(self._plan)
            with progress_bar(show and self._ranks.rank == 0, f"saving {self.final.name}", total) as done:
                self._planner.written = done
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
