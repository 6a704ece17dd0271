"""Public operations on state prepare the model exactly once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from composable_fsdp import checkpoint, fully_shard
from tests._internals import FSDPState

pytestmark = [pytest.mark.behaviour("F-01"), pytest.mark.usefixtures("one_rank")]


def count_preparations(monkeypatch: pytest.MonkeyPatch, operation: Callable[[], object]) -> int:
    """Count how often ``operation`` prepares a model with one sharded module."""
    calls: list[FSDPState] = []
    with monkeypatch.context() as patches:
        patches.setattr(FSDPState, "drain_before_changes", lambda state: calls.append(state))
        operation()
    return len(calls)


def test_a_public_operation_prepares_the_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fully_shard(nn.Linear(3, 3), reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state, of_optimizer = checkpoint.state_dict(model), checkpoint.optimizer_state_dict(model, optimizer)
    operations: dict[str, Callable[[], Any]] = {
        "state_dict": lambda: checkpoint.state_dict(model, checkpoint.Full()),
        "load_state_dict": lambda: checkpoint.load_state_dict(model, state),
        "optimizer_state_dict": lambda: checkpoint.optimizer_state_dict(model, optimizer),
        "load_optimizer_state_dict": lambda: checkpoint.load_optimizer_state_dict(model, optimizer, of_optimizer),
        "save": lambda: checkpoint.save(tmp_path / "run", model, optimizer),
        "load": lambda: checkpoint.load(tmp_path / "run", model, optimizer),
        "save_safetensors": lambda: checkpoint.save_safetensors(model, tmp_path / "files"),
        "load_safetensors": lambda: checkpoint.load_safetensors(model, tmp_path / "files"),
    }
    found = {name: count_preparations(monkeypatch, operation) for name, operation in operations.items()}
    assert found.pop("load_state_dict") == 2, "the library and the method of the model each prepare once"
    assert set(found.values()) == {1}, found
