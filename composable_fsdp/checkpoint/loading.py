"""One load on one rank: finding and checking the checkpoint, whether it fits, and reading it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from composable_fsdp.checkpoint.contents import set_random_state
from composable_fsdp.checkpoint.ema import ShardedEMA
from composable_fsdp.checkpoint.folder import MANIFEST, find
from composable_fsdp.checkpoint.manifest import Manifest, check_file
from composable_fsdp.checkpoint.progress import progress_bar
from composable_fsdp.checkpoint.ranks import Ranks
from composable_fsdp.checkpoint.reports import Misfit, leave_common_unexpected, refuse, told
from composable_fsdp.checkpoint.restore import Restore, read_objects
from composable_fsdp.checkpoint.storage import read_metadata

__all__ = ["Loading"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Fit:
    """How a checkpoint fits one rank.

    Attributes:
        misfit: of model and optimizer.
        has_communication: whether the checkpoint has state of codecs.
        wants_communication: whether codecs here keep any.
        fits_communication: whether what is wanted is there.
    """

    misfit: Misfit
    has_communication: bool
    wants_communication: bool
    fits_communication: bool


class Loading:
    """One load, on one rank.

    Args:
        ranks: that load.
        path: a checkpoint, or a folder of them.
        show: whether to show bars on rank 0.
    """

    def __init__(self, ranks: Ranks, path: Path, *, show: bool) -> None:
        self._ranks = ranks
        self._what = f"loading {path}"
        self._show = show and ranks.rank == 0
        self.folder, self._manifest = ranks.from_first(self._what, lambda: _found(path))
        self._same_ranks = self._manifest is not None and self._manifest.ranks == ranks.size
        self._own = f"ranks.{ranks.rank if self._same_ranks else 0}"

    def check(self, *, contents: bool) -> None:
        """Whether all files are there in full, and unless ``contents`` is false whether they are what was written."""
        manifest = self._manifest
        if manifest is not None:
            self._ranks.agree(self._what, lambda: self._check_share(manifest, contents))
        elif self._ranks.rank == 0:
            logger.warning("%s has no %s: whether it is intact cannot be verified", self.folder, MANIFEST)

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
            kinds = ["model.", "communication.", f"{self._own}."]
            kinds += [kind for kind, wants in (("optimizer.", optimizer), ("averages.", averages)) if wants is not None]
            keys = [key for key in metadata.state_dict_metadata if key.startswith(tuple(kinds))]
            self._objects = read_objects(self.folder, metadata, keys, weights_only=weights_only)
            self._restore = restore = Restore(model, optimizer, averages, metadata, self._objects)
            saved = any(key.startswith("communication.") for key in keys)
            return _Fit(restore.misfit, saved, restore.wants_communication, restore.fits_communication)

        name = type(model).__name__
        self._communication = self._ranks.exchange(self._what, each, lambda fits: self._judged(fits, name, strict))

    def read(self) -> None:
        """Reads this rank's parts of all tensors."""
        self._ranks.agree(
            self._what,
            lambda: self._restore.run(self.folder, communication=self._communication, show=self._show),
        )

    def restore_random_state(self) -> None:
        """Sets the random number generators, if as many ranks saved theirs."""
        state = self._objects.get(f"{self._own}.random")
        if self._same_ranks and state is not None:
            set_random_state(state)

    @property
    def extra(self) -> dict[str, Any]:
        """What this rank saved besides, or else rank 0."""
        return cast(dict[str, Any], self._objects.get(f"{self._own}.extra", {}))

    def _check_share(self, manifest: Manifest, contents: bool) -> None:
        by_size = sorted(manifest.files.items(), key=lambda item: (-item[1].bytes, item[0]))
        share = by_size[self._ranks.rank :: self._ranks.size]
        total = sum(record.bytes for _, record in share)
        with progress_bar(self._show and contents, f"verifying {self.folder.name}", total) as done:
            for name, record in share:
                check_file(self.folder / name, record, contents=contents)
                done(record.bytes)

    def _judged(self, fits: list[_Fit], model: str, strict: bool) -> list[bool]:
        """Whether the state of codecs is loaded too, for each rank."""
        misfits = {rank: fit.misfit for rank, fit in enumerate(fits)}
        leave_common_unexpected(list(misfits.values()))
        refuse(
            f"{self.folder} does not fit {model}",
            misfits if strict else {rank: Misfit(shapes=misfit.shapes) for rank, misfit in misfits.items()},
        )
        differences = told(misfits)
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


def _found(path: Path) -> tuple[Path, Manifest | None]:
    folder = find(path)
    return folder, Manifest.read(folder) if (folder / MANIFEST).exists() else None
