"""Test ranks that skip different modules in forward, backward or both, with other modules in every step."""

from __future__ import annotations

import copy
import random
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as peer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from composable_fsdp import MixedPrecisionPolicy, fully_shard
from composable_fsdp.errors import LifecycleError
from tests._internals import state_of
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.transports import SOCKETS, TRANSPORTS

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
        return self.head(x)


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


def fill_with_zeros(reference: nn.Module) -> None:
    """Fill gradients that no rank has with zeros, as torch's FSDP2 does, so that an optimizer treats them alike."""
    for parameter in reference.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


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
        fill_with_zeros(reference)
        assert all(p.grad is not None for p in model.parameters()), step
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
    if world_size == 4:
        run_ranks(train_unequally, 4, replicate=2)


@pytest.mark.behaviour("C-17")
@on_ranks(2)
def test_modules_that_run_in_another_order_than_they_are_registered_are_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for layer in model:
        fully_shard(layer)

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](self.layers[1](x))

    single_group: Any = fully_shard(Backwards())
    single_group.set_reduce_scatter_unused_params(True)
    with pytest.raises(LifecycleError, match=r"'layers\.0' runs a second time in one forward, or after a module that"):
        single_group(torch.ones(2, 3))
    single_group.set_reduce_scatter_unused_params(False)
    single_group(torch.ones(2, 3)).sum().backward()


class Encoded(nn.Module):
    """Has a frozen encoder that only some ranks run without gradients, and a container without own parameters."""

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
        return self.head(x)


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
    fill_with_zeros(reference)
    for (name, p), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (expected.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), expected.grad)


@pytest.mark.behaviour("C-17")
@pytest.mark.parametrize("world_size", [2, 4])
def test_frozen_encoders_and_containers_without_parameters_may_be_skipped(world_size: int) -> None:
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


def shard_a_list() -> None:
    model: Any = Encoded()
    fully_shard([model.encoder, model.inner])
    fully_shard(model)
    model.set_reduce_scatter_unused_params(True)
    with pytest.raises(
        LifecycleError, match=r"'encoder, inner' are several modules of one group.*shard them one by one"
    ):
        model(batch_of(0, dist.get_rank()), True)


@pytest.mark.behaviour("C-17")
def test_unsupported_models_for_unused_modules_are_an_error() -> None:
    run_ranks(recompute_a_container, 2)
    run_ranks(shard_a_list, 2)


class Partly(nn.Module):
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


@pytest.mark.behaviour("C-17", "C-13")
@on_ranks(2, 4)
def test_ranks_may_use_different_parts_of_checkpointed_layers() -> None:
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


class Skippable(nn.Module):
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


@pytest.mark.behaviour("C-17")
@on_ranks(2, environment=SOCKETS)
def test_ranks_with_unused_modules_gather_alike_under_a_memory_bound() -> None:
    model: Any = Having()
    for module in (*model.skippable.parts, model.skippable, model):
        fully_shard(module)
    model.set_reduce_scatter_unused_params(True)
    nbytes = state_of(model.skippable).group.plan.unsharded_bytes
    model.set_schedule(max_unsharded_bytes=3 * nbytes)  # the root, which stays, and two of the other three groups
    for step in range(3):
        model(batch_of(step, dist.get_rank()), dist.get_rank() == 0).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.chosen, self.idle = (nn.Parameter(torch.ones(8, 4)) for _ in range(3))
        self.frozen = nn.Parameter(torch.ones(8, 4), requires_grad=False)

    def forward(self, x: torch.Tensor, chosen: bool) -> torch.Tensor:
        out: torch.Tensor = self.used.sum() * x + self.frozen.sum()
        return out + self.chosen.sum() if chosen else out


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Unused(), Unused()

    def forward(self, x: torch.Tensor, chosen: bool = False, skips: bool = False) -> torch.Tensor:
        out: torch.Tensor = self.first(x, chosen)
        return out if skips else self.second(out, False)


def build_twice(shard: Any, *, zeros: bool, **options: Any) -> Any:
    model = Twice()
    for module in (model.first, model.second, model):
        shard(module, **options)
    model.set_reduce_scatter_unused_params(zeros)  # type: ignore[operator]
    return model


def gradients_of(model: nn.Module) -> dict[str, Any]:
    return {name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else None for name, p in model.named_parameters()}


def collect_gradients(shard: Any) -> dict[str, dict[str, torch.Tensor | None]]:
    found, x = {}, torch.ones(())
    for zeros in (True, False):
        model = build_twice(shard, zeros=zeros)
        model(x).backward()
        found[f"{zeros}: one step"] = gradients_of(model)
        model(x, chosen=True).backward()
        found[f"{zeros}: another microbatch on top"] = gradients_of(model)
        model.zero_grad()
        model(x, skips=True).backward()
        found[f"{zeros}: all skip the second module"] = gradients_of(model)
        model.zero_grad()
        for sync in (False, True):
            model.set_requires_gradient_sync(sync)
            model(x, chosen=not sync).backward()
        found[f"{zeros}: two microbatches, one reduction"] = gradients_of(model)
        model.zero_grad(set_to_none=False)
        model(x).backward()
        found[f"{zeros}: on top of zeros"] = gradients_of(model)
    model = build_twice(shard, zeros=True)
    model.second.requires_grad_(False)
    model.first.set_reduce_scatter_unused_params(False)
    model(x).backward()
    found["frozen, and not asked for"] = gradients_of(model)
    return found


@pytest.mark.behaviour("C-17")
@on_ranks(2)
def test_parameters_that_no_rank_used_get_zeros_if_asked_for_as_with_torchs_fsdp2() -> None:
    ours, theirs = collect_gradients(fully_shard), collect_gradients(peer.fully_shard)
    for case, expected in theirs.items():
        assert {n for n, g in ours[case].items() if g is None} == {n for n, g in expected.items() if g is None}, case
        torch.testing.assert_close(ours[case], expected, msg=lambda m, case=case: f"{case}: {m}")  # type: ignore[misc]
    zero = torch.zeros(8, 4)
    for name in ("first.chosen", "first.idle", "second.idle"):
        torch.testing.assert_close(ours["True: one step"][name], zero)
        assert ours["False: one step"][name] is None
    assert all(g is None for n, g in ours["frozen, and not asked for"].items() if n != "first.used")

    x, bf16 = torch.ones(()), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    theirs_at_first, model = (
        build_twice(peer.fully_shard, zeros=True),
        build_twice(fully_shard, zeros=True, mp_policy=bf16),
    )
    for each in (theirs_at_first, model):
        each(x, skips=True).backward()
    assert gradients_of(theirs_at_first)["second.idle"] is None, "a module that never ran has no gradient"
    for name, gradient in gradients_of(model).items():
        if not name.endswith("frozen"):
            assert gradient.dtype is torch.float32
            assert name == "first.used" or not gradient.any(), name


class Tower(nn.Module):
    """The inputs of this module need no gradient, so no hook shows the end of its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(300, 300), nn.Linear(300, 300)

    def forward(self, x: torch.Tensor, uses_second: bool) -> torch.Tensor:
        x = self.first(x)
        return cast(torch.Tensor, self.second(x)) if uses_second else x


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = Tower(), Tower(), nn.Linear(300, 1)

    def forward(self, x: torch.Tensor, uses_second: bool) -> torch.Tensor:
        return self.head(self.left(x, True) + self.right(x, uses_second)).sum()


@pytest.mark.behaviour("C-17")
@on_ranks(2, transports=TRANSPORTS)
def test_ranks_may_use_different_parameters_of_modules_whose_inputs_need_no_gradient() -> None:
    """Use ``right.second`` only on rank 0."""
    torch.manual_seed(0)
    reference, x = TwoTowers(), torch.ones(2, 300)
    model: Any = copy.deepcopy(reference)
    for tower in (model.left, model.right):
        fully_shard(tower)
    fully_shard(model).set_reduce_scatter_unused_params(True)
    for _ in range(2):
        model.zero_grad()
        model(x, dist.get_rank() == 0).backward()
    for rank in range(2):
        (reference(x, rank == 0) / 2).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), reference.get_parameter(name).grad)
