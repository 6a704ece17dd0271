"""Sharded checkpoints: each rank writes its own part of parameters and AdamW state, and reads it back."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from .launch import from_rank_0
from .options import UsageError
from .training import Trainer

NAME = re.compile(r"checkpoint-(\d+)")


class Checkpoints:
    """The checkpoints in one folder, and the fingerprints of those that this run wrote or read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fingerprints: dict[int, str] = {}

    def save(self, trainer: Trainer, step: int) -> None:
        """Write the state after ``step`` steps. Its metadata file comes last, so that a torn checkpoint has none."""
        state = _state(trainer)
        self._fingerprints[step] = _fingerprint(state)
        dcp.save(state, checkpoint_id=self._path(step))

    def load(self, trainer: Trainer, step: int) -> bool:
        """Bring ``trainer`` to the state after ``step`` steps.

        Returns:
            Whether that state is, bit by bit and on every rank, the one that this run wrote or read there before;
            true if it did neither.
        """
        state = _state(trainer)
        dcp.load(state, checkpoint_id=self._path(step))
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(trainer.model, trainer.optimizer, **parts)
        loaded = _fingerprint(_state(trainer))
        return _on_every_rank(loaded == self._fingerprints.setdefault(step, loaded))

    def prepare(self, *, resume: bool, overwrite: bool) -> int:
        """The step to start from: that of the newest complete checkpoint with ``resume``, else 0.

        Raises:
            UsageError: there are checkpoints but neither flag is given, or ``resume`` finds none.
        """
        return from_rank_0(lambda: _prepare(self._folder, resume=resume, overwrite=overwrite))

    def _path(self, step: int) -> Path:
        return self._folder / f"checkpoint-{step:06d}"


def _state(trainer: Trainer) -> dict[str, Any]:
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    return {"model": model, "optimizer": optimizer}


def _fingerprint(state: dict[str, Any]) -> str:
    """A hash of this rank's part of every tensor in a nested state dict."""
    digest = hashlib.sha256()
    for name, value in state.items():
        digest.update(name.encode())
        if isinstance(value, dict):
            digest.update(_fingerprint(value).encode())
        elif isinstance(value, torch.Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            digest.update(local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _on_every_rank(condition: bool) -> bool:
    failures = torch.tensor(0 if condition else 1)
    dist.all_reduce(failures)
    return failures.item() == 0


def _prepare(folder: Path, *, resume: bool, overwrite: bool) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the folder {folder} can not be made: {error.strerror}") from error
    found = sorted(path for path in folder.iterdir() if NAME.fullmatch(path.name))
    if overwrite:
        for path in found:
            shutil.rmtree(path)
        return 0
    complete = [path for path in found if (path / ".metadata").exists()]
    if resume and not complete:
        raise UsageError(f"--resume found no complete checkpoint in {folder}: leave it out to start from the beginning")
    if found and not resume:
        raise UsageError(
            f"{folder} already holds {found[-1].name}: pass --resume to go on from there, --overwrite to delete it, "
            "or another folder as --out"
        )
    return int(complete[-1].name.removeprefix("checkpoint-")) if complete else 0
