"""Calls that bypass the module's ``__call__``: ``forward``, registered methods, under checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from composable_fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from composable_fsdp.trace import Operation, Recorder
from tests.helpers.assert_trace import assert_trace
from tests.helpers.models import TASKS, Chain, seeded, shard_layers
from tests.helpers.run_ranks import run_ranks
from tests.helpers.training import Play, check_parity, play_task


class Direct(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer.forward(x))
        return x


def play_directly(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Alternate ``model(x)`` and ``model.forward(x)``, which are equivalent."""
    x, target = TASKS["chain"].batch_of(step, rank)
    loss: torch.Tensor = ((model if step % 2 else model.forward)(x) - target).square().mean()
    loss.backward()
    return loss.detach()


def call_forward_directly(reshard_after_forward: bool | int | None) -> None:
    for build in (seeded(Direct), TASKS["chain"].build):
        with Recorder() as recorder:
            check_parity(build, play_directly, reshard_after_forward=reshard_after_forward)
        assert recorder.allocated == {}
    model = shard_layers(seeded(Direct, depth=1)(), fully_shard)
    x = torch.ones(1, 8)
    with Recorder() as recorder:
        model.forward(x)
    assert_trace(
        (e for e in recorder if e.group == "layers.0"), "unshard layers.0", "wait layers.0", "reshard layers.0"
    )
    low = fully_shard(nn.Linear(8, 8), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert low.forward(x).dtype is torch.bfloat16  # cast once, as in a call
    with pytest.raises(RuntimeError):
        model.forward(torch.ones(1, 3))
    torch.testing.assert_close(model.forward(x), model(x))  # a failed call leaves no state


@pytest.mark.behaviour("C-08")
@pytest.mark.parametrize(("world_size", "reshard"), [(1, None), (2, True), (2, None), (4, 2)])
def test_forward_may_be_called_directly(world_size: int, reshard: bool | int | None) -> None:
    run_ranks(call_forward_directly, world_size, reshard)


class Speaker(Chain):
    """Generates without gradients, as language models do."""

    def generate(self, x: torch.Tensor, length: int) -> torch.Tensor:
        for _ in range(length):
            x = self(x)
        return x + self.layers[0](x)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.generate(x, 1).sum()


def generate_between_steps(mode: Callable[[], Any], reshard_after_forward: bool | None) -> None:
    def shard(model: nn.Module) -> None:
        shard_layers(model, fully_shard, reshard_after_forward=reshard_after_forward)
        register_fsdp_forward_method(model, "generate")
        register_fsdp_forward_method(model, "score")

    def play(model: Any, step: int, rank: int) -> torch.Tensor:
        x, target = TASKS["chain"].batch_of(step, rank)
        with mode():
            before = model.score(x).clone()
        loss: torch.Tensor = (model(x) - target).square().mean()
        with mode():
            between = model.generate(x, 2).sum().clone()
        loss.backward()
        with mode():
            after = model.generate(x, 1 + step % 2).sum().clone()
        return torch.stack([loss.detach(), before, between, after])

    with Recorder() as recorder:
        model: Any = check_parity(seeded(Speaker), play, shard=shard)
    if reshard_after_forward:
        assert recorder.allocated == {}
        assert all(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.behaviour("C-08", "C-10")
@pytest.mark.parametrize("reshard", [True, False, None])
def test_registered_methods_generate_without_gradients_between_steps(reshard: bool | None) -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        run_ranks(generate_between_steps, 2, mode, reshard)


class Nested(nn.Module):
    """An outer group with an inner one; all of it runs twice under one checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Linear(8, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(self.layers[0](torch.tanh(self.outer(x)))) + self.outer(x))


class TwiceUnderOne(nn.Module):
    def __init__(self, *, use_reentrant: bool, shape: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Nested(), Nested()])
        self.scale = nn.Parameter(torch.ones(8))
        self.shape = shape
        self.checkpoint = partial(checkpoint, use_reentrant=use_reentrant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x * self.scale)
        if self.shape == "one module twice":
            for layer in self.layers:
                x = self.checkpoint(lambda y, layer=layer: layer(layer(y)), x)
        elif self.shape == "two inputs":
            for layer in self.layers:
                x = self.checkpoint(lambda a, b, layer=layer: layer(a) * layer(b), x, x + 1)
        elif self.shape == "inner module besides":
            for layer in self.layers:
                x = self.checkpoint(lambda y, layer=layer: layer.layers[0](layer(y)), x)
        else:
            x = self.checkpoint(lambda y: self.layers[1](self.layers[0](self.layers[1](y))), x)
        return torch.tanh(x)


SHAPES = ("one module twice", "two inputs", "inner module besides", "one around the other")


def shard_nested(model: nn.Module, **options: Any) -> nn.Module:
    for layer in model.get_submodule("layers").children():
        shard_layers(layer, fully_shard, **options)
    return fully_shard(model, **options)


def two_forwards_under_one_checkpoint(use_reentrant: bool, reshard_after_forward: bool | int | None) -> None:
    play: Play = play_task("chain")
    for shape in SHAPES:
        with Recorder() as recorder:
            check_parity(
                seeded(TwiceUnderOne, use_reentrant=use_reentrant, shape=shape),
                play,
                shard=partial(shard_nested, reshard_after_forward=reshard_after_forward),
                what=shape,
            )
        assert recorder.allocated == {}, shape
        assert "layers.1.layers.0" in {e.group for e in recorder if e.operation is Operation.REDUCE}


@pytest.mark.behaviour("C-13", "C-04")
@pytest.mark.parametrize(
    ("world_size", "use_reentrant", "reshard"),
    [(2, False, True), (2, False, None), (2, True, True), (2, True, None), (4, True, 2)],
)
def test_nested_groups_run_twice_under_one_checkpoint(
    world_size: int, use_reentrant: bool, reshard: bool | int | None
) -> None:
    run_ranks(two_forwards_under_one_checkpoint, world_size, use_reentrant, reshard)
