"""Test several forwards and backwards in a step, and backwards through a part of the outputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from composable_fsdp import fully_shard
from composable_fsdp.trace import Recorder
from tests.helpers.models import TASKS, Routed, seeded
from tests.helpers.run_ranks import run_ranks
from tests.helpers.training import OPTIMIZERS, check_parity
from tests.helpers.two_headed_model import WIDTH, Heads, inputs_of, one_forward_one_backward

Play = Callable[[nn.Module, int, int], torch.Tensor]


def two_forwards_one_backward(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    first, second = model(inputs_of(step, rank)), model(inputs_of(step, rank, 1), extra=True)
    loss: torch.Tensor = (first["left"] * second["right"]).square().mean() + second["left"].square().mean()
    loss.backward()
    return loss.detach()


def two_forwards_two_backwards(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    losses = [model(inputs_of(step, rank, i), extra=True)["left"].square().mean() for i in range(2)]
    for loss in losses if step % 2 else losses[::-1]:
        loss.backward()
    return torch.stack(losses).detach()


def backward_twice_over_one_forward(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    out = model(inputs_of(step, rank))
    loss: torch.Tensor = out["left"].square().mean() + out["right"].square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return loss.detach()


def backward_over_one_output_then_the_other(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    out = model(inputs_of(step, rank), extra=bool(step % 2))
    losses = [out["left"].square().mean(), out["right"].square().mean()]
    losses[0].backward(retain_graph=True)
    losses[1].backward()
    return torch.stack(losses).detach()


def backward_over_one_output_only(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    loss: torch.Tensor = model(inputs_of(step, rank))["left" if step % 2 else "right"].square().mean()
    loss.backward()
    return loss.detach()


def forwards_that_nobody_comes_back_to(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    model(inputs_of(step, rank, 1))
    kept = model(inputs_of(step, rank, 2), extra=True)
    loss = one_forward_one_backward(model, step, rank)
    return torch.stack([loss, kept["left"].detach().sum()])


def gradients_of_inputs_only(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = inputs_of(step, rank, 1).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x)["left"].square().mean(), x)
    return torch.stack([one_forward_one_backward(model, step, rank), gradient.sum()])


PLAYS: dict[str, Play] = {
    play.__name__: play
    for play in (
        one_forward_one_backward,
        two_forwards_one_backward,
        two_forwards_two_backwards,
        backward_twice_over_one_forward,
        backward_over_one_output_then_the_other,
        backward_over_one_output_only,
        forwards_that_nobody_comes_back_to,
        gradients_of_inputs_only,
    )
}


def train_with_repeats(reshard_after_forward: bool | int | None) -> None:
    for name, play in PLAYS.items():
        with Recorder() as recorder:
            check_parity(seeded(Heads), play, what=name, steps=4, reshard_after_forward=reshard_after_forward)
        if name != "forwards_that_nobody_comes_back_to":
            assert recorder.allocated == {}, name


@pytest.mark.behaviour("C-04")
@pytest.mark.parametrize(("world_size", "reshard"), [(2, True), (2, False), (2, None), (4, 2)])
def test_repeated_and_partial_forwards_and_backwards_train(world_size: int, reshard: bool | int | None) -> None:
    run_ranks(train_with_repeats, world_size, reshard)


class Recursive(nn.Module):
    """Calls itself, and computes with its parameters before and after that."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = torch.tanh(self.down(x))
        if depth:
            x = self(x, depth - 1)
        out: torch.Tensor = torch.tanh(self.up(x))
        return out


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Recursive(), Recursive()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = layer(x)
        return x


def train_recursive_modules() -> None:
    def play(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        loss: torch.Tensor = model(inputs_of(step, rank)).square().mean()
        loss.backward()
        return loss.detach()

    check_parity(seeded(Around), play, reshard_after_forward=True)
    check_parity(seeded(Recursive), play, shard=lambda model: fully_shard(model, reshard_after_forward=True))


@pytest.mark.behaviour("C-04")
def test_a_module_that_calls_itself_trains() -> None:
    run_ranks(train_recursive_modules, 2)


def leave_layers_out() -> None:
    """Check that an unused layer has no gradient, keeps its values and optimizer state, and can be used again later."""
    task = TASKS["routed"]
    routes = ([0, 1], [2], [0, 1, 2, 3], [3, 0], [1])

    def play(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        assert isinstance(model, Routed)
        model.route = routes[step]
        loss = task.loss(model, task.batch_of(step, rank))
        loss.backward()
        return loss.detach()

    def check(model: nn.Module, step: int) -> None:
        used = [model.get_submodule(f"layers.{i}") for i in routes[step]]
        for layer in model.get_submodule("layers").children():
            assert all((p.grad is not None) == (layer in used) for p in layer.parameters())

    for optimizer in ("sgd", "adamw-fused"):
        check_parity(task.build, play, OPTIMIZERS[optimizer], steps=len(routes), between=check, what=optimizer)


@pytest.mark.behaviour("C-04")
@pytest.mark.parametrize("world_size", [2, 4])
def test_an_unused_layer_has_no_gradient_and_training_goes_on(world_size: int) -> None:
    run_ranks(leave_layers_out, world_size)


# -- accumulation
