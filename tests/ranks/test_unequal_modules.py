"""Ranks that skip whole modules, in forward, in backward or both, each step others."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from composable_fsdp import LifecycleError, fully_shard
from composable_fsdp.runtime.unit import unit_of
from composable_fsdp.testing import run_ranks
from tests.transports import SOCKETS

STEPS = 6
SKIP, RUN, RUN_IN_VAIN = 0, 1, 2


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(self.norm(x)))


class Chosen(nn.Module):
    """Layers of which each call runs some; a second level inside layer 1."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 5)
        self.layers = nn.ModuleList([Residual(5), nn.Sequential(Residual(5), Residual(5)), Residual(5), Residual(5)])
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, choices: list[int]) -> torch.Tensor:
        x = self.stem(x)
        for layer, choice in zip(self.layers, choices, strict=True):
            if choice != SKIP:
                out = layer(x)
                x = out if choice == RUN else x
        result: torch.Tensor = self.head(x)
        return result


def choices_of(step: int, rank: int) -> list[int]:
    generator = random.Random(100 * step + rank)
    return [generator.choice([SKIP, RUN, RUN, RUN_IN_VAIN]) for _ in range(4)]


def batch_of(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def sharded(model: Any, nested: bool = True, **options: Any) -> Any:
    for layer in model.layers:
        if nested and isinstance(layer, nn.Sequential):
            fully_shard(layer[1], **options)
        fully_shard(layer, **options)
    fully_shard(model, **options)
    model.set_reduce_scatter_unused_params(True)
    return model


def train_unequally(replicate: int = 1, accumulate: int = 1, reshard: bool | None = None) -> None:
    torch.manual_seed(3)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (replicate, world_size // replicate))
    reference = Chosen()
    model = sharded(copy.deepcopy(reference), mesh=mesh, reshard_after_forward=reshard)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference)]
    for step in range(STEPS):
        for part in range(accumulate):
            model.set_requires_gradient_sync(part == accumulate - 1)
            turn = step * accumulate + part
            model(batch_of(turn, rank), choices_of(turn, rank)).square().mean().backward()
            for other in range(world_size):
                loss = reference(batch_of(turn, other), choices_of(turn, other)).square().mean()
                (loss / world_size).backward()
        for (name, p), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (expected.grad is None), (step, name)
        with torch.no_grad():
            model(batch_of(step, rank), choices_of(step + 1000, rank))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.full_tensor(), reference.state_dict()[name])


@pytest.mark.behaviour("C-17")
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_skip_modules_train_with_parity(world_size: int) -> None:
    run_ranks(train_unequally, world_size)
    run_ranks(train_unequally, world_size, accumulate=2)
    run_ranks(train_unequally, world_size, reshard=False)


@pytest.mark.behaviour("C-17")
def test_ranks_of_a_hybrid_mesh_that_skip_modules_train_with_parity() -> None:
    run_ranks(train_unequally, 4, replicate=2)


def run_out_of_order() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for layer in model:
        fully_shard(layer)

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layers[0](self.layers[1](x))
            return result

    whole: Any = fully_shard(Backwards())
    whole.set_reduce_scatter_unused_params(True)
    with pytest.raises(LifecycleError, match=r"'layers\.0' runs a second time in one forward, or after a module that"):
        whole(torch.ones(2, 3))
    whole.set_reduce_scatter_unused_params(False)
    whole(torch.ones(2, 3)).sum().backward()


@pytest.mark.behaviour("C-17")
def test_modules_that_run_in_another_order_than_they_are_registered_are_named() -> None:
    run_ranks(run_out_of_order, 2)


class Encoded(nn.Module):
    """A frozen encoder that only some ranks run, without gradients, and a container without parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 5)
        self.encoder = Residual(5)
        self.inner = nn.Sequential(Residual(5), Residual(5))
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, encodes: bool, checkpoints: bool = False) -> torch.Tensor:
        x = self.stem(x)
        if encodes:
            with torch.no_grad():
                encoded = self.encoder(x)
            x = x + encoded
            x = checkpoint(self.inner, x, use_reentrant=False) if checkpoints else self.inner(x)
        result: torch.Tensor = self.head(x)
        return result


def encode_on_some_ranks(reshard: bool | int | None) -> None:
    torch.manual_seed(3)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    reference = Encoded()
    reference.encoder.requires_grad_(False)
    model: Any = copy.deepcopy(reference)
    for module in (model.encoder, *model.inner, model.inner, model):
        fully_shard(module, reshard_after_forward=reshard)
    model.set_reduce_scatter_unused_params(True)
    for step in range(3):
        model(batch_of(step, rank), (step + rank) % 2 == 0).square().mean().backward()
        for other in range(world_size):
            loss = reference(batch_of(step, other), (step + other) % 2 == 0).square().mean()
            (loss / world_size).backward()
    for (name, p), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (expected.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), expected.grad)


@pytest.mark.behaviour("C-17")
@pytest.mark.parametrize("world_size", [2, 4])
def test_an_encoder_without_gradients_and_containers_without_parameters_may_be_skipped(world_size: int) -> None:
    for reshard in (None, False, *([2] if world_size == 4 else [])):
        run_ranks(encode_on_some_ranks, world_size, reshard)


def recompute_a_container() -> None:
    model: Any = Encoded()
    model.inner.append(Residual(5))
    for module in (*model.inner, model.inner, model):
        fully_shard(module)
    model.set_reduce_scatter_unused_params(True)
    loss = model(batch_of(0, dist.get_rank()), True, True).sum()
    with pytest.raises(
        LifecycleError, match=r"'inner\.\d' is recomputed as part of a module around it.*each sharded mod"
    ):
        loss.backward()


def list_in_step() -> None:
    model: Any = Encoded()
    fully_shard([model.encoder, model.inner])
    fully_shard(model)
    model.set_reduce_scatter_unused_params(True)
    with pytest.raises(
        LifecycleError, match=r"'encoder, inner' are several modules of one group.*shard them one by one"
    ):
        model(batch_of(0, dist.get_rank()), True)


@pytest.mark.behaviour("C-17")
def test_what_cannot_be_kept_in_step_is_an_error() -> None:
    run_ranks(recompute_a_container, 2)
    run_ranks(list_in_step, 2)


class Partly(nn.Module):
    """Two branches of which a call may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        left: torch.Tensor = torch.tanh(self.left(x))
        return left + self.right(x) if both else left


class PartlyTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Partly(), Partly(), Partly()])

    def forward(self, x: torch.Tensor, both: bool, checkpoints: bool) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, both, use_reentrant=False) if checkpoints else layer(x, both)
        return x


def use_parts_of_checkpointed_layers() -> None:
    torch.manual_seed(3)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    reference = PartlyTwice()
    model: Any = copy.deepcopy(reference)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    x = batch_of(0, rank).requires_grad_()
    model(x, rank == 0, True).square().mean().backward()
    for other in range(world_size):
        (reference(batch_of(0, other), other == 0, False).square().mean() / world_size).backward()
    for p, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), expected.grad)


@pytest.mark.behaviour("C-17", "C-13")
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_may_use_different_parts_of_checkpointed_layers(world_size: int) -> None:
    run_ranks(use_parts_of_checkpointed_layers, world_size)


class Skippable(nn.Module):
    """A module with parameters of its own around two others."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(5, 5)
        self.parts = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.own(x))
        for part in self.parts:
            x = torch.tanh(part(x))
        return x


class Having(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.skippable = nn.Linear(5, 5), Skippable()

    def forward(self, x: torch.Tensor, runs: bool) -> torch.Tensor:
        x = self.stem(x)
        return self.skippable(x) if runs else x


def bound_memory_while_one_rank_skips() -> None:
    model: Any = Having()
    for module in (*model.skippable.parts, model.skippable, model):
        fully_shard(module)
    model.set_reduce_scatter_unused_params(True)
    nbytes = unit_of(model.skippable).group.plan.unsharded_bytes
    model.set_max_unsharded_bytes(3 * nbytes)  # the root, which stays, and two of the other three
    for step in range(3):
        model(batch_of(step, dist.get_rank()), dist.get_rank() == 0).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.behaviour("C-17")
def test_ranks_in_step_gather_alike_under_a_bound_of_memory() -> None:
    run_ranks(bound_memory_while_one_rank_skips, 2, environment=SOCKETS)
