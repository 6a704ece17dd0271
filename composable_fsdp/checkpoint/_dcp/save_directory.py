"""One save on one rank: who writes what, the writing, and putting it in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.optim import Optimizer

from composable_fsdp.checkpoint._coordination.mismatch import dtype_name
from composable_fsdp.checkpoint._coordination.progress import progress_bar
from composable_fsdp.checkpoint._coordination.rank_group import Ranks
from composable_fsdp.checkpoint._dcp.contents import Contents, contents_of
from composable_fsdp.checkpoint._dcp.directory import Writing, complete
from composable_fsdp.checkpoint._dcp.filesystem import ChecksummingWriter
from composable_fsdp.checkpoint._dcp.manifest import FileRecord, Manifest, TensorRecord, library_version
from composable_fsdp.checkpoint._dcp.optimizer_state import agreed, check_alike, offer_of
from composable_fsdp.checkpoint._dcp.planner import SavePlanner, add_aliases
from composable_fsdp.checkpoint._state_dict import inner_tensors as tensor_classes
from composable_fsdp.checkpoint._state_dict.ema import ShardedEMA

__all__ = ["Saving"]


@dataclass(frozen=True)
class _Planned:
    """By one rank."""

    plan: SavePlan
    aliases: Mapping[str, str]
    alike: Mapping[str, int]


@dataclass(frozen=True)
class _Written:
    """By one rank."""

    results: list[WriteResult]
    records: Mapping[str, FileRecord]


class Saving:
    """One save, on one rank. Rank 0 also has ``_writing`` and ``_metadata``, once it is planned.

    Args:
        ranks: that save.
        path: the folder of checkpoints.
        step: of this one; ``None`` for the one after the newest.
        keep_last: how many to keep; ``None`` for all.
    """

    def __init__(self, ranks: Ranks, path: Path, step: int | None, keep_last: int | None) -> None:
        self._ranks = ranks
        self._path = path
        self._asked = step
        self._keep_last = keep_last
        self._aliases: dict[str, str] = {}
        self._metadata: Metadata | None = None
        self._writing: Writing | None = None

    def plan(
        self, model: nn.Module, optimizer: Optimizer | None, averages: ShardedEMA | None, extra: Mapping[str, Any]
    ) -> None:
        """Who writes what, and where to."""

        what = f"saving to {self._path}"
        of_all = self._ranks.exchange(
            what, lambda: offer_of(model, optimizer), lambda offers: [agreed(offers)] * len(offers)
        )

        contents = Contents()

        def offers() -> Mapping[str, tensor_classes.Offer]:
            nonlocal contents
            contents = contents_of(model, optimizer, averages, extra, self._ranks.rank, of_all)
            return contents.inner_offers()

        inner = self._ranks.exchange(what, offers, lambda of_ranks: [tensor_classes.agreed(of_ranks)] * len(of_ranks))

        def each() -> _Planned:
            contents.expand(inner)
            self._planner = SavePlanner(contents)
            return _Planned(self._planner.create_local_plan(), contents.aliases, contents.alike)

        def central(planned: list[_Planned]) -> Sequence[tuple[Path, Path, int, SavePlan]]:
            check_alike([each.alike for each in planned])
            plans, self._metadata = self._planner.create_global_plan([each.plan for each in planned])
            for each in planned:
                self._aliases |= each.aliases
            step = max(complete(self._path), default=-1) + 1 if self._asked is None else self._asked
            self._writing = writing = Writing(self._path, step)
            plans = ChecksummingWriter(writing.partial).prepare_global_plan(plans)
            return [(writing.final, writing.partial, step, plan) for plan in plans]

        with self._abandoned_on_failure():
            reply = self._ranks.exchange(what, each, central)
        self.final, self._partial, self.step, self._plan = reply

    def stage(self) -> None:
        """Copies to host memory what this rank writes."""
        with self._abandoned_on_failure():
            self._ranks.agree(f"saving {self.final}", lambda: self._planner.stage(self._plan))

    def write(self, show: bool) -> None:
        """Writes, and puts in place what all have written."""
        writer = ChecksummingWriter(self._partial)
        writer.set_up_storage_writer(self._ranks.rank == 0)

        def each() -> _Written:
            total = self._planner.nbytes(self._plan)
            with progress_bar(show and self._ranks.rank == 0, f"saving {self.final.name}", total) as done:
                self._planner.written = done
                written = writer.write_data(self._plan, self._planner)
                written.wait()
            return _Written(written.value(), writer.records)

        def central(written: list[_Written]) -> Sequence[None]:
            self._finish(writer, written)
            return [None] * len(written)

        with self._abandoned_on_failure():
            self._ranks.exchange(f"saving {self.final}", each, central)

    @contextmanager
    def _abandoned_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self._writing is not None:
                self._writing.abandon()
            raise

    def _finish(self, writer: ChecksummingWriter, written: list[_Written]) -> None:
        assert self._writing is not None
        assert self._metadata is not None
        results = [each.results for each in written]
        add_aliases(self._metadata, results, self._aliases)
        writer.finish(self._metadata, results)
        files = {name: record for each in written for name, record in each.records.items()} | writer.records
        tensors = {
            key: TensorRecord(tuple(saved.size), dtype_name(saved.properties.dtype))
            for key, saved in self._metadata.state_dict_metadata.items()
            if isinstance(saved, TensorStorageMetadata)
        }
        manifest = Manifest(self.step, self._ranks.size, files, tensors, library_version(), torch.__version__)
        manifest.write(self._partial)
        self._writing.commit(self._keep_last)
