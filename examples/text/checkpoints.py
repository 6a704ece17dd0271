"""Saves, finds and loads checkpoints of a run with ``composable_fsdp.checkpoint``, and compares them."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from composable_fsdp.checkpoint import Local, latest, load, optimizer_state_dict, save, state_dict

from .launch import from_rank_0
from .options import UsageError
from .training import Trainer

NAME = re.compile(r"step-(\d+)")


class Checkpoints:
    """The checkpoints in one folder, and the fingerprints of those that this run wrote or read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths: dict[int, Path] = {}
        self._fingerprints: dict[int, str] = {}

    def save(self, trainer: Trainer, step: int) -> None:
        """Write the state after ``step`` steps."""
        self._fingerprints[step] = _fingerprint(trainer)
        self._paths[step] = save(self._folder, trainer.model, trainer.optimizer, step=step).path

    def load(self, trainer: Trainer, step: int) -> bool:
        """Load the state after ``step`` steps into ``trainer``.

        Returns:
            True if the state is on every rank bitwise equal to the one that this run wrote or read there before, or if
            it did neither.
        """
        load(self._paths[step], trainer.model, trainer.optimizer)
        loaded = _fingerprint(trainer)
        return _on_every_rank(loaded == self._fingerprints.setdefault(step, loaded))

    def prepare(self, *, resume: bool, overwrite: bool) -> int:
        """Return the first step: with ``resume`` that of the newest complete checkpoint, else 0.

        Raises:
            UsageError: there are checkpoints but neither flag is given, or ``resume`` finds none.
        """
        newest = from_rank_0(lambda: _prepare(self._folder, resume=resume, overwrite=overwrite))
        if newest is None:
            return 0
        step = int(NAME.match(newest.name)[1])
        self._paths[step] = newest
        return step


def _fingerprint(trainer: Trainer) -> str:
    """Return a hash of this rank's parameters and AdamW state."""
    digest = hashlib.sha256()
    _hash(state_dict(trainer.model, Local()), digest)
    _hash(optimizer_state_dict(trainer.model, trainer.optimizer, Local())["state"], digest)
    return digest.hexdigest()


def _hash(state: dict[str, Any], digest: Any) -> None:
    for name, value in state.items():
        digest.update(name.encode())
        if isinstance(value, dict):
            _hash(value, digest)
        else:
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _on_every_rank(condition: bool) -> bool:
    failures = torch.tensor(0 if condition else 1)
    dist.all_reduce(failures)
    return failures.item() == 0


def _prepare(folder: Path, *, resume: bool, overwrite: bool) -> Path | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the folder {folder} can not be made: {error.strerror}") from error
    if overwrite:
        for path in folder.iterdir():
            if NAME.match(path.name):
                shutil.rmtree(path)
    newest = latest(folder)
    if resume and newest is None:
        raise UsageError(f"--resume found no complete checkpoint in {folder}: leave it out to start from the beginning")
    if newest is not None and not resume:
        raise UsageError(
            f"{folder} already holds {newest.name}: pass --resume to go on from there, --overwrite to delete it, "
            "or another folder as --out"
        )
    return newest
