"""Trains models in one process, returns their states, and damages checkpoint files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def trained(width: int = 3) -> tuple[Tied, torch.optim.AdamW]:
    model = Tied(width)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, width)).sum().backward()
    optimizer.step()
    return model, optimizer


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@contextmanager
def unreadable(path: Path) -> Iterator[None]:
    """Take all rights on ``path`` from this process, which may be root's."""
    user, mode = os.geteuid(), path.stat().st_mode
    for parent in path.parents:  # pytest's folders are open to their owner only
        if "pytest" in str(parent):
            parent.chmod(0o755)
    path.chmod(0)
    os.seteuid(65534 if user == 0 else user)
    try:
        yield
    finally:
        os.seteuid(user)
        path.chmod(mode)
