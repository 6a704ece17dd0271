"""Saves checkpoints from several ranks for conversion, and checks the converted checkpoints."""

from __future__ import annotations

import random
from pathlib import Path

import torch.distributed as dist

from composable_fsdp.checkpoint import load, load_safetensors, save
from tests.helpers.checkpoint_worlds import WORLDS, adamw, assert_holds, fill, zeroed

__all__ = ["load_everything", "load_model", "load_tensors", "save_everything"]


def save_everything(world: str, path: Path) -> None:
    """Save the model, AdamW and the rank-specific values."""
    model = WORLDS[world][1]()
    optimizer = adamw(model)
    fill(model, optimizer)
    rank = dist.get_rank()
    random.seed(rank)
    save(path, model, optimizer, {"step": 20, "rank": rank})


def load_everything(world: str, path: Path) -> None:
    """Check that everything from :func:`save_everything` loads, on any number of ranks."""
    model = zeroed(WORLDS[world][1]())
    optimizer = adamw(model)
    extra = load(path, model, optimizer)
    assert_holds(model, optimizer)
    same_ranks = dist.get_world_size() == 2
    assert extra == {"step": 20, "rank": dist.get_rank() if same_ranks else 0}
    if same_ranks:
        assert random.getstate() == random.Random(dist.get_rank()).getstate()


def load_model(world: str, path: Path) -> None:
    """Check that the tensors of the model load, without extra state."""
    model = zeroed(WORLDS[world][1]())
    load(path, model, strict=False)
    model.counter.calls = 42
    assert_holds(model)


def load_tensors(world: str, path: Path) -> None:
    """Check that the tensors load from safetensors."""
    model = zeroed(WORLDS[world][1]())
    load_safetensors(model, path)
    model.counter.calls = 42
    assert_holds(model)
