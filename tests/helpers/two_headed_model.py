"""A model with two outputs and a layer that a forward may skip."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 6


class Heads(nn.Module):
    """Has a trunk that runs twice, two heads, and a layer that only the first microbatch of a step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {
                "trunk": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
                "between": nn.Linear(WIDTH, WIDTH),
                "left": nn.Linear(WIDTH, 3),
                "right": nn.Linear(WIDTH, 3),
                "extra": nn.Linear(WIDTH, WIDTH),
            }
        )
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor, extra: bool = False) -> dict[str, torch.Tensor]:
        x = self.layers["trunk"](x) * self.scale
        x = self.layers["trunk"](torch.tanh(self.layers["between"](x)))
        if extra:
            x = x + torch.tanh(self.layers["extra"](x))
        return {"left": self.layers["left"](x), "right": torch.tanh(self.layers["right"](x))}


def inputs_of(step: int, rank: int, microbatch: int = 0) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1000 * step + 10 * rank + microbatch))


def one_forward_one_backward(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    out = model(inputs_of(step, rank))
    loss: torch.Tensor = out["left"].square().mean() + out["right"].square().mean()
    loss.backward()
    return loss.detach()


EVERY = {"root", *(f"layers.{name}" for name in ("trunk", "between", "left", "right", "extra"))}
