"""Test that ranks with different models raise an error with the differences before they communicate."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import cycle
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import DivergenceError, MixedPrecisionPolicy, fully_shard
from tests.helpers.counted_collectives import counted_collectives
from tests.helpers.run_ranks import on_ranks
from tests.helpers.slack import slack
from tests.helpers.transports import COPIES, SOCKETS, TRANSPORTS

SECONDS = 5.0
"""The time within which every rank must raise the error."""


class Block(nn.Module):
    def __init__(self, *, width: int = 8, swapped: bool = False) -> None:
        super().__init__()
        layers = {"up": nn.Linear(8, width), "down": nn.Linear(width, 8)}
        for name in reversed(layers) if swapped else layers:
            self.add_module(name, layers[name])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule("down")(self.get_submodule("up")(x))


def shard(model: nn.Sequential, **options: Any) -> nn.Sequential:
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def build_two(**options: Any) -> nn.Sequential:
    return nn.Sequential(Block(), Block(**options))


def change_dtype() -> nn.Sequential:
    model = build_two()
    model[1].to(torch.bfloat16)
    return shard(model)


def wrap_differently() -> nn.Sequential:
    model = build_two()
    fully_shard(model[0])
    return fully_shard(model)


def add_parameter() -> nn.Sequential:
    model = build_two()
    model[1].register_parameter("scale", nn.Parameter(torch.ones(8)))
    return shard(model)


def freeze_one() -> nn.Sequential:
    model = shard(build_two())
    model.get_parameter("1.up.bias").requires_grad_(False)
    return model


DIFFERENCES: dict[str, tuple[Callable[[], nn.Sequential], str, str]] = {
    "shape": (
        lambda: shard(build_two(width=12)),
        r"parameter 'up\.weight'.*: float32 \(8, 8\), placed",
        r"parameter 'up\.weight'.*: float32 \(12, 8\)",
    ),
    "dtype": (
        change_dtype,
        r"parameter 'up\.weight'.*: float32 \(8, 8\)",
        r"parameter 'up\.weight'.*: bfloat16 \(8, 8\)",
    ),
    "order": (lambda: shard(build_two(swapped=True)), r"parameter 'up\.weight'", r"parameter 'down\.weight'"),
    "wrapping": (wrap_differently, r"parameter 'up\.weight'|group '0' of Block", r"parameter '1\.up\.weight'"),
    "one more": (add_parameter, r"parameter 'up\.weight'", r"parameter 'scale'.*: float32 \(8,\)"),
    "precision": (
        lambda: shard(build_two(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
        r"group 'root' of Sequential: MixedPrecisionPolicy\(\), |parameter 'up\.weight': float32 .*, placed .*\)\n",
        r"(group 'root' of Sequential: |parameter 'up\.weight'.*, )MixedPrecisionPolicy\(param_dtype=torch\.bfloat16",
    ),
    "frozen": (
        freeze_one,
        r"parameter 'up\.bias' of group '1': float32 \(8,\), placed \(Shard\(dim=0\),\) on a mesh of \(2,\)\n",
        r"parameter 'up\.bias' of group '1': float32 \(8,\), .*, frozen\n",
    ),
}
"""What the last rank builds instead of ``shard(build_two())``, and the lines of the error."""


@pytest.mark.behaviour("H-02", "H-05")
@pytest.mark.parametrize(("difference", "transport"), list(zip(DIFFERENCES, cycle(TRANSPORTS), strict=False)))
@on_ranks(2, environment="transport")
def test_the_differences_are_in_the_error_of_every_rank(difference: str) -> None:
    build, usual, other = DIFFERENCES[difference]

    def first_forward() -> None:
        model = build() if dist.get_rank() == 1 else shard(build_two())
        model(torch.ones(2, 8))

    begin = monotonic()
    with pytest.raises(DivergenceError, match=r"^Ranks have built different models\. The first difference") as caught:
        first_forward()
    assert monotonic() - begin < SECONDS * slack()
    assert re.search(rf"(?m)^  rank 0: ({usual})", str(caught.value))
    assert re.search(rf"(?m)^  rank 1: ({other})", str(caught.value))
    assert "shard them by the same calls with the same options" in str(caught.value)
    torch.manual_seed(0)  # models of other sizes have advanced the generators differently
    shard(build_two())(torch.ones(2, 8))  # no state is broken: ranks with the same model continue


@pytest.mark.behaviour("H-02")
@on_ranks(2)
def test_values_of_other_shapes_are_not_sent() -> None:
    model = build_two(width=12 if dist.get_rank() == 1 else 8)
    with pytest.raises(
        DivergenceError, match=r"rank 0: up\.weight: float32 \(8, 8\)\n  rank 1: up\.weight: float32 \(12"
    ):
        fully_shard(model[1], sync_module_states=True)


@pytest.mark.behaviour("H-02")
@on_ranks(4, environment=SOCKETS)
def test_replicas_are_compared_too() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    width = 12 if dist.get_rank() >= 2 else 8
    model = shard(build_two(width=width), mesh=mesh)
    with pytest.raises(DivergenceError, match=r"(?s)ranks 0-1: .*\(8, 8\).*ranks 2-3: .*\(12, 8\)"):
        model(torch.ones(2, 8))


def count_comparisons(model: nn.Sequential) -> list[int]:
    found = []
    for _ in range(3):
        with counted_collectives() as counts:
            model(torch.ones(2, 8)).sum().backward()
        found.append(counts["comparison"])
    return found


@pytest.mark.behaviour("H-02", "G-04")
@on_ranks(2, environment=COPIES)
def test_models_are_compared_once_by_one_message_unless_ranks_are_trusted() -> None:
    model, trusted = shard(build_two()), shard(build_two())
    trusted.set_order_check("off")  # type: ignore[operator]
    assert count_comparisons(model) == [1, 0, 0]
    assert count_comparisons(trusted) == [0, 0, 0]
