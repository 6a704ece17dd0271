"""Sharded checkpoints: each rank writes its own part of parameters and AdamW state, and reads it back."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from .options import UsageError
from .training import Trainer

T = TypeVar("T")
NAME = re.compile(r"checkpoint-(\d+)")


def folder_of(out: Path, step: int) -> Path:
    """Where the checkpoint after ``step`` steps lies."""
    return out / f"checkpoint-{step:06d}"


def save(trainer: Trainer, out: Path, step: int) -> None:
    """Write the state after ``step`` steps. The metadata file comes last, so that a torn checkpoint has none."""
    dcp.save(_state(trainer, step), checkpoint_id=folder_of(out, step))


def load(trainer: Trainer, out: Path, step: int) -> None:
    """Bring ``trainer`` to the state after ``step`` steps."""
    state = _state(trainer, step)
    dcp.load(state, checkpoint_id=folder_of(out, step))
    set_state_dict(
        trainer.model,
        trainer.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


def _state(trainer: Trainer, step: int) -> dict[str, Any]:
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    return {"model": model, "optimizer": optimizer, "step": step}


def same_state(one: Trainer, other: Trainer) -> bool:
    """Whether parameters and AdamW state are equal, bit by bit, on every rank."""
    left, right = _tensors(_state(one, 0)), _tensors(_state(other, 0))
    equal = left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
    unequal = torch.tensor(0 if equal else 1)
    dist.all_reduce(unequal)
    return int(unequal.item()) == 0


def _tensors(state: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """This rank's part of each tensor in a nested state dict, by its path."""
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if isinstance(value, dict):
            found |= _tensors(value, f"{prefix}{name}/")
        elif isinstance(value, DTensor):
            found[prefix + name] = value.to_local().detach()
        elif isinstance(value, torch.Tensor):
            found[prefix + name] = value.detach()
    return found


def prepare_folder(out: Path, *, resume: bool, overwrite: bool) -> int:
    """The step to start from: that of the newest complete checkpoint with ``resume``, else 0.

    Raises:
        UsageError: there are checkpoints but neither flag is given, or ``resume`` finds none.
    """
    return _from_rank_0(lambda: _prepare(out, resume=resume, overwrite=overwrite))


def _prepare(out: Path, *, resume: bool, overwrite: bool) -> int:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the folder {out} can not be made: {error.strerror}") from error
    found = sorted(path for path in out.iterdir() if NAME.fullmatch(path.name))
    if overwrite:
        for path in found:
            shutil.rmtree(path)
        return 0
    complete = [path for path in found if (path / ".metadata").exists()]
    if resume and not complete:
        raise UsageError(f"--resume found no complete checkpoint in {out}: leave it out to start from the beginning")
    if found and not resume:
        raise UsageError(
            f"{out} already holds {found[-1].name}: pass --resume to go on from there, --overwrite to delete it, "
            "or another folder as --out"
        )
    return int(complete[-1].name.removeprefix("checkpoint-")) if complete else 0


def _from_rank_0(look: Callable[[], T]) -> T:
    """What ``look`` returns or raises on rank 0, on every rank: only one of them touches the folder."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer = [look(), None]
        except UsageError as error:
            answer = [None, error]
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    found: T = answer[0]
    return found
