"""One load on one rank: finding and checking the checkpoint, whether it fits, and reading it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from composable_fsdp.checkpoint._coordination.mismatch import Mismatch, joined, leave_common_unexpected, refuse, told
from composable_fsdp.checkpoint._coordination.progress import progress_bar
from composable_fsdp.checkpoint._coordination.rank_group import Ranks
from composable_fsdp.checkpoint._dcp import directory as folder
from composable_fsdp.checkpoint._dcp.contents import set_random_state
from composable_fsdp.checkpoint._dcp.directory import MANIFEST
from composable_fsdp.checkpoint._dcp.filesystem import read_metadata
from composable_fsdp.checkpoint._dcp.intact import listed, problem_of, read_manifest, share_of
from composable_fsdp.checkpoint._dcp.manifest import Manifest
from composable_fsdp.checkpoint._dcp.restore import Restore, read_objects
from composable_fsdp.checkpoint._state_dict.ema import ShardedEMA
from composable_fsdp.errors import CheckpointError

__all__ = ["Loading"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Fit:
    """How a checkpoint fits one rank.

    Attributes:
        mismatch: of model and optimizer.
        has_communication: whether the checkpoint has state of codecs.
        wants_communication: whether codecs here keep any.
        fits_communication: whether what is wanted is there.
    """

    mismatch: Mismatch
    has_communication: bool
    wants_communication: bool
    fits_communication: bool


@dataclass(frozen=True)
class _Read:
    """How reading went on one rank: whether it changed anything, and why it ended early, if it did."""

    has_changed: bool
    problem: str


class Loading:
    """One load, on one rank.

    Args:
        ranks: that load.
        path: a checkpoint, or a folder of them.
        contents: compare checksums of all files; otherwise only their sizes.
        fallback: take the newest intact checkpoint in the folder if newer ones are damaged.
        show: whether to show bars on rank 0.

    Raises:
        CheckpointError: there is no checkpoint, or the one to be loaded is damaged.
    """

    def __init__(self, ranks: Ranks, path: Path, *, contents: bool, fallback: bool, show: bool) -> None:
        self._ranks = ranks
        self._what = f"loading {path}"
        self._show = show and ranks.rank == 0
        self.folder, self._manifest = self._chosen(path, contents, fallback)
        self._is_verified = contents or self._manifest is None
        self._same_ranks = self._manifest is not None and self._manifest.ranks == ranks.size
        self._own = f"ranks.{ranks.rank if self._same_ranks else 0}"

    def _chosen(self, path: Path, contents: bool, fallback: bool) -> tuple[Path, Manifest | None]:
        """The checkpoint to load, with its manifest, if it has one. The same on all ranks, which each check a share."""
        options = self._ranks.from_first(self._what, lambda: folder.options(path))
        damaged: dict[str, str] = {}
        for option in options:
            manifest, problem = self._examined(option, contents, is_given=option == path)
            if not problem:
                if damaged:
                    self._fall_back(option, damaged, fallback)
                return option, manifest
            damaged[option.name] = problem
        if len(options) == 1:
            raise CheckpointError(f"{self._what}: {damaged[options[0].name]}")
        raise CheckpointError(f"{self._what}: no checkpoint in it is intact:{listed(damaged)}")

    def _examined(self, option: Path, contents: bool, *, is_given: bool) -> tuple[Manifest | None, str]:
        """The manifest of a checkpoint, if it has one, and what is damaged of it, if anything is."""
        if is_given and not self._ranks.from_first(self._what, (option / MANIFEST).is_file):
            if self._ranks.rank == 0:
                logger.warning("%s has no %s: whether it is intact cannot be verified", option, MANIFEST)
            return None, ""
        manifest, problem = self._ranks.from_first(self._what, lambda: read_manifest(option))
        if manifest is not None:
            problem = self._ranks.exchange(
                self._what,
                lambda: self._problem_of_share(option, manifest, contents),
                lambda found: [joined({r: text for r, text in enumerate(found) if text}, len(found))] * len(found),
            )
        return manifest, problem

    def _problem_of_share(self, option: Path, manifest: Manifest, contents: bool) -> str:
        """Describe the damage in this rank's share of the files."""
        share = share_of(manifest, self._ranks.rank, self._ranks.size)
        total = sum(record.bytes for record in share.values())
        with progress_bar(self._show and contents, f"verifying {option.name}", total) as done:
            return problem_of(option, share, contents=contents, done=done)

    def _fall_back(self, option: Path, damaged: dict[str, str], fallback: bool) -> None:
        """Says that ``option`` is the newest that is intact: in a warning, or in an error if that is no option."""
        if not fallback:
            raise CheckpointError(
                f"{self._what}: the newest checkpoint is damaged. {option.name} is the newest that is intact: pass "
                f"fallback=True to load it. Damaged:{listed(damaged)}"
            )
        if self._ranks.rank == 0:
            text = "%s: %s is loaded, the newest checkpoint that is intact. Damaged:%s"
            logger.warning(text, self._what, option.name, listed(damaged))

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        averages: ShardedEMA | None,
        *,
        strict: bool,
        weights_only: bool,
    ) -> None:
        """Reads what is no tensor, and finds out where tensors go and whether all fits."""

        def each() -> _Fit:
            metadata = read_metadata(self.folder)
            kinds = ["model.", "classes.", "communication.", f"{self._own}."]
            kinds += [kind for kind, wants in (("optimizer.", optimizer), ("averages.", averages)) if wants is not None]
            keys = [key for key in metadata.state_dict_metadata if key.startswith(tuple(kinds))]
            self._objects = read_objects(self.folder, metadata, keys, weights_only=weights_only)
            self._restore = restore = Restore(model, optimizer, averages, metadata, self._objects)
            saved = any(key.startswith("communication.") for key in keys)
            return _Fit(restore.mismatch, saved, restore.wants_communication, restore.fits_communication)

        name = type(model).__name__
        self._communication = self._ranks.exchange(self._what, each, lambda fits: self._judged(fits, name, strict))

    def read(self) -> None:
        """Reads this rank's parts of all tensors."""
        failure: CheckpointError | None = None

        def each() -> _Read:
            nonlocal failure
            try:
                self._restore.run(self.folder, communication=self._communication, show=self._show)
            except CheckpointError as error:
                failure = error
            return _Read(self._restore.has_changed, "" if failure is None else str(failure))

        try:
            self._ranks.exchange(self._what, each, self._all_read)
        except CheckpointError as error:
            raise error from failure

    def restore_random_state(self) -> None:
        """Sets the random number generators, if as many ranks saved theirs."""
        state = self._objects.get(f"{self._own}.random")
        if self._same_ranks and state is not None:
            set_random_state(state)

    @property
    def extra(self) -> dict[str, Any]:
        """What this rank saved besides, or else rank 0."""
        return cast(dict[str, Any], self._objects.get(f"{self._own}.extra", {}))

    def _all_read(self, reads: list[_Read]) -> list[None]:
        problems = {rank: read.problem for rank, read in enumerate(reads) if read.problem}
        if problems:
            state = "The model is loaded in part." if any(r.has_changed for r in reads) else "Nothing was loaded."
            advice = "" if self._is_verified else " verify=True finds damage before anything is loaded."
            raise CheckpointError(f"{joined(problems, len(reads))} {state}{advice}")
        return [None] * len(reads)

    def _judged(self, fits: list[_Fit], model: str, strict: bool) -> list[bool]:
        """Whether the state of codecs is loaded too, for each rank."""
        mismatches = {rank: fit.mismatch for rank, fit in enumerate(fits)}
        leave_common_unexpected(list(mismatches.values()))
        refuse(
            f"{self.folder} does not fit {model}",
            mismatches if strict else {r: Mismatch(shapes=m.shapes, classes=m.classes) for r, m in mismatches.items()},
        )
        differences = told(mismatches)
        if differences:
            logger.warning("%s is loaded in part.\n%s", self.folder, differences)
        wanted = any(fit.wants_communication for fit in fits)
        loads = wanted and self._same_ranks and all(fit.fits_communication for fit in fits)
        if not loads and (wanted or fits[0].has_communication):
            logger.warning(
                "%s: what codecs with error feedback keep is left out, since it was saved on other ranks or with other "
                "codecs. What one step lost is all that is missing.",
                self.folder,
            )
        return [loads] * len(fits)
