"""Several forwards, several backwards, parts of them; gradients accumulated with and without communication."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from composable_fsdp import FSDPModule, fully_shard
from composable_fsdp.testing import run_ranks
from composable_fsdp.trace import Operation, Recorder
from tests.helpers.models import TASKS, Routed, seeded
from tests.helpers.training import OPTIMIZERS, check_parity

Play = Callable[[nn.Module, int, int], torch.Tensor]

WIDTH = 6


class Heads(nn.Module):
    """A trunk that is used twice, two heads, and a layer of which only the first microbatch of a step makes use."""

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
    """A layer that took no part has no gradient; its optimizer state and it stay; and later it takes part again."""
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
def test_a_layer_that_took_no_part_has_no_gradient_and_training_goes_on(world_size: int) -> None:
    run_ranks(leave_layers_out, world_size)


# -- accumulation


def accumulating(setting: str, microbatches: int = 3) -> Play:
    """A play of several microbatches; the last one does not use all layers of the first."""

    def play(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        losses = []
        for i in range(microbatches):
            is_last = i == microbatches - 1
            if isinstance(model, FSDPModule):
                set_up_microbatch(model, setting, is_last)
            with Recorder() as recorder:
                out = model(inputs_of(step, rank, i), extra=i == 0)
                loss = (out["left"].square().mean() + out["right"].square().mean()) / microbatches
                loss.backward()
            losses.append(loss.detach())
            if isinstance(model, FSDPModule):
                reduced = {e.group for e in recorder if e.operation is Operation.REDUCE}
                check_reduced(setting, reduced, is_last, is_first=i == 0)
        return torch.stack(losses)

    return play


EVERY = {"root", *(f"layers.{name}" for name in ("trunk", "between", "left", "right", "extra"))}


def set_up_microbatch(model: FSDPModule, setting: str, is_last: bool) -> None:
    if setting == "without communication":
        model.set_requires_gradient_sync(is_last)
    elif setting == "without communication, kept unsharded":
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)
        model.set_is_last_backward(is_last)
    elif setting == "without communication of the root":
        model.set_requires_gradient_sync(is_last, recurse=False)
    elif setting == "not the last backward":
        model.set_is_last_backward(is_last)


def check_reduced(setting: str, reduced: set[str], is_last: bool, *, is_first: bool) -> None:
    used = EVERY if is_first else EVERY - {"layers.extra"}
    if is_last or setting in ("with communication", "not the last backward"):
        # What the first microbatch left of a layer that the last one does not use travels at the end, too.
        held = {"layers.extra"} if setting.startswith("without communication") and "root" not in setting else set()
        assert reduced == used | held, setting
    elif setting == "without communication of the root":
        assert reduced == used - {"root"}
    else:
        assert reduced == set(), setting


SETTINGS = (
    "with communication",
    "not the last backward",
    "without communication",
    "without communication, kept unsharded",
    "without communication of the root",
)


def accumulate_gradients(reshard_after_forward: bool | int | None) -> None:
    for setting in SETTINGS:
        check_parity(
            seeded(Heads),
            accumulating(setting),
            what=setting,
            steps=5,
            merges=False,
            reshard_after_forward=reshard_after_forward,
        )


@pytest.mark.behaviour("C-07")
@pytest.mark.parametrize(("world_size", "reshard"), [(2, True), (2, False), (2, None), (4, 2)])
def test_accumulated_gradients_are_those_of_the_large_batch(world_size: int, reshard: bool | int | None) -> None:
    run_ranks(accumulate_gradients, world_size, reshard)


def accumulate_over_an_evaluation_and_a_changed_mind() -> None:
    """Unreduced gradients outlive an evaluation; and those of a step that is given up are dropped by a reset."""

    def play(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(False)
            model(inputs_of(step, rank, 9))["left"].sum().backward()
            model.reset_iter_state()  # given up
        model(inputs_of(step, rank, 0))["left"].square().mean().backward()
        with torch.no_grad():
            value = model(inputs_of(step, rank, 1))["left"].sum()
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(True)
        loss = one_forward_one_backward(model, step, rank)
        return torch.stack([loss, value])

    check_parity(seeded(Heads), play)


@pytest.mark.behaviour("C-07", "C-10", "H-01")
def test_unreduced_gradients_outlive_an_evaluation_and_not_a_reset() -> None:
    run_ranks(accumulate_over_an_evaluation_and_a_changed_mind, 2)
