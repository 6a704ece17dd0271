"""A small model with tied weights and several kinds of buffers."""

from __future__ import annotations

import torch
from torch import nn


class Small(nn.Module):
    """Has tied weights, a persistent buffer, a non-persistent buffer and an expanded buffer."""

    spread: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("spread", torch.zeros(1).expand(4))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def filled(seed: int) -> Small:
    torch.manual_seed(seed)
    model = Small()
    with torch.no_grad():
        for value in [*model.parameters(), model.get_buffer("norm.running_mean")]:
            value.copy_(torch.randn(value.shape))
    return model


def assert_alike(model: nn.Module, other: nn.Module) -> None:
    expected = other.state_dict()
    for name, value in model.state_dict().items():
        assert value.dtype == expected[name].dtype, name
        assert torch.equal(value, expected[name]), name
