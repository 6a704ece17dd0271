"""Test that ranks with other versions of this library, or of torch, are named before the first collective."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from composable_fsdp import DivergenceError, fully_shard
from composable_fsdp.checkpoint import load, save
from composable_fsdp.errors import CheckpointError
from tests._internals import library_version
from tests.helpers.faults import is_last
from tests.helpers.run_ranks import on_ranks
from tests.helpers.transports import TRANSPORTS

OWN = f"composable_fsdp {importlib.metadata.version('composable-fsdp')}, torch {torch.__version__}"


@pytest.mark.behaviour("G-01")
@pytest.mark.parametrize(
    ("use", "transport"), list(zip(["train", "sync", "save", "load"], cycle(TRANSPORTS), strict=False))
)
@pytest.mark.parametrize("of", ["torch", "composable_fsdp"])
@on_ranks(2, environment="transport")
def test_ranks_with_other_versions_are_named(of: str, use: str, tmp_path: Path) -> None:
    """Give the last rank another version of ``of``, and begin to train, to save or to load."""
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    uses: dict[str, Callable[[], object]] = {
        "train": lambda: fully_shard(model)(torch.ones(1, 4)),
        "sync": lambda: fully_shard(model, sync_module_states=True),
        "save": lambda: save(tmp_path / "checkpoints", model, optimizer),
        "load": lambda: load(tmp_path / "checkpoints", model, optimizer),
    }
    kind = DivergenceError if use in ("train", "sync") else CheckpointError
    other = OWN
    with pytest.MonkeyPatch.context() as patch:
        if of == "torch":
            other = OWN.replace(torch.__version__, "9.8.7")
            if is_last():
                patch.setattr(torch, "__version__", "9.8.7")
        else:
            other = f"composable_fsdp 9.8.7, torch {torch.__version__}"
            if is_last():
                patch.setattr(importlib.metadata, "version", lambda _: "9.8.7")
        library_version.cache_clear()
        with pytest.raises(kind) as raised:
            uses[use]()
    library_version.cache_clear()
    text = f"Ranks run different versions:\n  rank 0: {OWN}\n  rank 1: {other}\nInstall the same"
    assert text in str(raised.value)
    assert not (tmp_path / "checkpoints").exists()
