"""The steps of one load on one rank: choose and verify the checkpoint, compare it with the model, read it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from composable_fsdp.checkpoint._coordination.mismatch import (
    Mismatch,
    join_rank_texts,
    leave_common_unexpected,
    mismatch_text,
    refuse,
)
from composable_fsdp.checkpoint._coordination.progress import progress_bar
from composable_fsdp.checkpoint._coordination.rank_group import RankGroup
from composable_fsdp.checkpoint._dcp import directory as folder
from composable_fsdp.checkpoint._dcp.contents import set_random_state
from composable_fsdp.checkpoint._dcp.directory import MANIFEST
from composable_fsdp.checkpoint._dcp.filesystem import read_metadata
from composable_fsdp.checkpoint._dcp.intact import damage_text, problem_of, read_manifest, share_of
from composable_fsdp.checkpoint._dcp.manifest import Manifest
from composable_fsdp.checkpoint._dcp.restore import RestorePlan, read_objects
from composable_fsdp.checkpoint._state_dict.ema import ShardedEMA
from composable_fsdp.errors import CheckpointError

__all__ = ["CheckpointLoader"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Fit:
    """The fit of a checkpoint on one rank.

    Attributes:
        mismatch: differences for model and optimizer.
        has_communication: True if the checkpoint has codec state.
        wants_communication: True if codecs of the model keep state.
        fits_communication: True if the checkpoint has that state in the right shapes.
    """

    mismatch: Mismatch
    has_communication: bool
    wants_communication: bool
    fits_communication: bool


class CheckpointLoader:
    """One load on one rank.

    Args:
        ranks: the ranks that load.
        path: a checkpoint, or a folder of them.
        contents: compare checksums of all files; otherwise only their sizes.
        fallback: load the newest intact checkpoint in the folder if newer ones are damaged.
        show: show progress bars on rank 0.

    Raises:
        CheckpointError: there is no checkpoint, or the one to load is damaged.
    """

    def __init__(self, ranks: RankGroup, path: Path, *, contents: bool, fallback: bool, show: bool) -> None:
        self._ranks = ranks
        self._what = f"loading {path}"
        self._show = show and ranks.rank == 0
        self.folder, self._manifest = self._choose(path, contents, fallback)
        self._is_verified = contents or self._manifest is None
        self._same_ranks = self._manifest is not None and self._manifest.ranks == ranks.size
        self._rank_prefix = f"ranks.{ranks.rank if self._same_ranks else 0}"

    def _choose(self, path: Path, contents: bool, fallback: bool) -> tuple[Path, Manifest | None]:
        """Return the checkpoint to load and its manifest, if any; equal on all ranks. Each rank checks a share of the
        files.
        """
        checkpoints = self._ranks.from_rank0(self._what, lambda: folder.checkpoints_at(path))
        damaged: dict[str, str] = {}
        for checkpoint in checkpoints:
            manifest, problem = self._examine(checkpoint, contents, is_given=checkpoint == path)
            if not problem:
                if damaged:
                    self._fall_back(checkpoint, damaged, fallback)
                return checkpoint, manifest
            damaged[checkpoint.name] = problem
        if len(checkpoints) == 1:
            raise CheckpointError(f"{self._what}: {damaged[checkpoints[0].name]}")
        raise CheckpointError(f"{self._what}: no checkpoint in it is intact:{damage_text(damaged)}")

    def _examine(self, checkpoint: Path, contents: bool, *, is_given: bool) -> tuple[Manifest | None, str]:
        """Return the manifest of a checkpoint, if any, and a description of its damage, empty if it is intact."""
        if is_given and not self._ranks.from_rank0(self._what, (checkpoint / MANIFEST).is_file):
            if self._ranks.rank == 0:
                logger.warning("%s has no %s: whether it is intact cannot be verified", checkpoint, MANIFEST)
            return None, ""
        manifest, problem = self._ranks.from_rank0(self._what, lambda: read_manifest(checkpoint))
        if manifest is not None:
            problem = self._ranks.combine(
                self._what,
                lambda: self._problem_of_share(checkpoint, manifest, contents),
                lambda found: join_rank_texts({r: text for r, text in enumerate(found) if text}, len(found)),
            )
        return manifest, problem

    def _problem_of_share(self, checkpoint: Path, manifest: Manifest, contents: bool) -> str:
        """Describe the damage in this rank's share of the files."""
        share = share_of(manifest, self._ranks.rank, self._ranks.size)
        total = sum(record.bytes for record in share.values())
        with progress_bar(self._show and contents, f"verifying {checkpoint.name}", total) as done:
            return problem_of(checkpoint, share, contents=contents, done=done)

    def _fall_back(self, checkpoint: Path, damaged: dict[str, str], fallback: bool) -> None:
        """Warn that ``checkpoint``, the newest intact one, is loaded. Without ``fallback`` raise an error instead."""
        if not fallback:
            raise CheckpointError(
                f"{self._what}: the newest checkpoint is damaged. {checkpoint.name} is the newest that is intact: pass "
                f"fallback=True to load it. Damaged:{damage_text(damaged)}"
            )
        if self._ranks.rank == 0:
            text = "%s: %s is loaded, the newest checkpoint that is intact. Damaged:%s"
            logger.warning(text, self._what, checkpoint.name, damage_text(damaged))

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        averages: ShardedEMA | None,
        *,
        strict: bool,
        weights_only: bool,
    ) -> None:
        """Read the objects of the checkpoint, match its tensors with the model's, and raise if they do not fit."""

        def each() -> _Fit:
            metadata = read_metadata(self.folder)
            kinds = ["model.", "classes.", "communication.", f"{self._rank_prefix}."]
            kinds += [kind for kind, wants in (("optimizer.", optimizer), ("averages.", averages)) if wants is not None]
            keys = [key for key in metadata.state_dict_metadata if key.startswith(tuple(kinds))]
            self._objects = read_objects(self.folder, metadata, keys, weights_only=weights_only)
            self._plan = plan = RestorePlan(model, optimizer, averages, metadata, self._objects)
            saved = any(key.startswith("communication.") for key in keys)
            return _Fit(plan.mismatch, saved, plan.wants_communication, plan.fits_communication)

        name = type(model).__name__
        self._communication = self._ranks.combine(self._what, each, lambda fits: self._decide(fits, name, strict))

    def read(self) -> None:
        """Read this rank's shards of all tensors."""
        failure: CheckpointError | None = None

        def each() -> tuple[bool, str]:
            nonlocal failure
            try:
                self._plan.run(self.folder, communication=self._communication, show=self._show)
            except CheckpointError as error:
                failure = error
            return self._plan.has_changed, "" if failure is None else str(failure)

        try:
            self._ranks.combine(self._what, each, self._check_reads)
        except CheckpointError as error:
            raise error from failure

    def restore_random_state(self) -> None:
        """Restore the random number generators if the checkpoint was saved on the same number of ranks."""
        state = self._objects.get(f"{self._rank_prefix}.random")
        if self._same_ranks and state is not None:
            set_random_state(state)

    @property
    def extra(self) -> dict[str, Any]:
        """The ``extra`` that this rank saved, or rank 0 if the number of ranks has changed."""
        return cast(dict[str, Any], self._objects.get(f"{self._rank_prefix}.extra", {}))

    def _check_reads(self, reads: list[tuple[bool, str]]) -> None:
        """Raise if a rank had a problem, the second of its pair. The first says whether it has changed anything."""
        problems = {rank: problem for rank, (_, problem) in enumerate(reads) if problem}
        if problems:
            state = "The model is loaded in part." if any(changed for changed, _ in reads) else "Nothing was loaded."
            advice = "" if self._is_verified else " verify=True finds damage before anything is loaded."
            raise CheckpointError(f"{join_rank_texts(problems, len(reads))} {state}{advice}")

    def _decide(self, fits: list[_Fit], model: str, strict: bool) -> bool:
        """Raise or warn about differences, and return whether to load the codec state."""
        mismatches = {rank: fit.mismatch for rank, fit in enumerate(fits)}
        leave_common_unexpected(mismatches.values())
        ignore = () if strict else ("missing", "unexpected", "dtypes", "others")
        refuse(f"{self.folder} does not fit {model}", mismatches, ignore)
        differences = mismatch_text(mismatches)
        if differences:
            logger.warning("%s is loaded in part.\n%s", self.folder, differences)
        wanted = any(fit.wants_communication for fit in fits)
        loads = wanted and self._same_ranks and all(fit.fits_communication for fit in fits)
        if not loads and (wanted or fits[0].has_communication):
            logger.warning(
                "%s: the state of codecs with error feedback is not loaded: it was saved on another number of ranks "
                "or with other codecs. Only the compression error of one step is lost.",
                self.folder,
            )
        return loads
