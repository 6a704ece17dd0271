"""Test that ranks that use different parameters of one group in the same step get the same gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from composable_fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, no_sync
from tests._internals import Around, Traits, state_of
from tests.helpers.models import seeded
from tests.helpers.run_ranks import run_ranks
from tests.helpers.training import assert_equal_runs, train


class Experts(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(experts)])
        self.chosen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x
        for index in self.chosen:
            out = out + torch.tanh(self.experts[index](x))
        return out


class Model(nn.Module):
    def __init__(self, width: int = 8, experts: int = 5) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList([Experts(width, experts) for _ in range(2)])
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def choose_experts(step: int, rank: int, layer: int) -> list[int]:
    """Return the chosen experts: one per rank in step 0, partly shared ones in step 1, the same ones in step 2."""
    return [[rank % 4], [layer, 1] if rank else [3], [0, 2], [3 - rank % 4, rank % 2]][step % 4]


def play(model: Any, step: int, rank: int) -> torch.Tensor:
    for i, layer in enumerate(model.layers):
        layer.chosen = choose_experts(step, rank, i)
    generator = torch.Generator().manual_seed(100 * step + rank)
    loss: torch.Tensor = model(torch.randn(4, model.width, generator=generator, requires_grad=True)).square().mean()
    loss.backward()
    return loss.detach()


def accumulate(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    if not isinstance(model, FSDPModule):
        return torch.stack([play(model, 3 * step + i, rank) for i in range(3)])
    assert isinstance(model, nn.Module)
    with no_sync(model):
        first = play(model, 3 * step, rank)
    with no_sync(model, sharded=True):
        second = play(model, 3 * step + 1, rank)
    return torch.stack([first, second, play(model, 3 * step + 2, rank)])


def play_jointly(model: Any, step: int, rank: int) -> torch.Tensor:
    """Play two forwards and one backward. On each rank, only one of the forwards uses the expert of the rank."""
    outputs = []
    for at in range(2):
        for layer in model.layers:
            layer.chosen = [0, rank] if (at + rank + step) % 2 else [0]
        generator = torch.Generator().manual_seed(100 * step + 10 * rank + at)
        outputs.append(model(torch.randn(4, model.width, generator=generator, requires_grad=True)))
    loss = torch.stack(outputs).square().mean()
    loss.backward()
    return loss.detach()


def shard(model: Model, mesh_shape: tuple[int, ...], reshard_after_forward: bool | None) -> Model:
    mesh = init_device_mesh("cpu", mesh_shape)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)


def check_that_ranks_agree(model: nn.Module) -> None:
    present = [name for name, p in model.named_parameters() if p.grad is not None]
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, present)
    assert all(each == present for each in everywhere)
    assert not any(name.startswith(("layers.0.experts.4", "layers.1.experts.4")) for name in present)


def train_unequally(mesh_shape: tuple[int, ...], width: int, steps: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    build = seeded(Model, width=width)
    for what, how in (("each step", play), ("accumulated", accumulate), ("jointly", play_jointly)):
        expected = train(build(), how, ranks=range(world_size), watched=rank, divide=world_size, steps=steps)
        for reshard in (True, None):
            model = build()
            assert isinstance(model, Model)
            shard(model, mesh_shape, reshard)
            ours = train(
                model,
                how,
                ranks=[rank],
                watched=rank,
                steps=steps,
                between=lambda model, step: check_that_ranks_agree(model),
            )
            assert_equal_runs(ours, expected, what=what)


@pytest.mark.behaviour("C-17", "C-04")
@pytest.mark.parametrize("mesh_shape", [(2,), (4,), (2, 2), (2, 1)])
def test_parameters_used_on_any_rank_have_the_same_gradient_on_all(mesh_shape: tuple[int, ...]) -> None:
    run_ranks(train_unequally, torch.Size(mesh_shape).numel(), mesh_shape, 8, 5)


class ZeroCopyFrom:
    """The traits of a decorated communicator, with another size from which messages are sent zero-copy."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def __get__(self, around: Around, _: object) -> Traits:
        return replace(around.base.traits, zero_copy_min_bytes=self._nbytes)

    def __set__(self, around: Around, value: Traits) -> None:
        vars(around)["traits"] = value


def train_unequally_with_direct_messages() -> None:
    """Train with zero-copy gradients, where flags need one more message. A few such gradients are packed instead."""
    for zero_copy_min_bytes in (1, 8 * 8 * 4):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Around, "traits", ZeroCopyFrom(zero_copy_min_bytes), raising=False)
            model = shard(Model(), (2,), True)
            (bucket,) = state_of(model.layers[0]).group.plan.buckets
            assert len(bucket.reduce.zero_copy) == (10 if zero_copy_min_bytes == 1 else 5)
            train_unequally((2,), 8, 4)


def sum_flags_in_low_precision() -> None:
    """Check that a flag summed over ranks does not vanish in bf16 and fp16, which divide messages before the sum."""
    for dtype in (torch.bfloat16, torch.float16):
        model = Model(experts=300)
        fully_shard(model.layers[0], mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        fully_shard(model)
        (layer, _) = model.layers
        layer.chosen = [dist.get_rank() * 7]  # type: ignore[assignment]
        x = torch.ones(2, 8, requires_grad=True)
        layer(x).square().mean().backward()
        present = {name for name, p in layer.named_parameters() if p.grad is not None}
        assert present == {
            f"experts.{7 * r}.{kind}" for r in range(dist.get_world_size()) for kind in ("weight", "bias")
        }
        assert all(isinstance(p.grad, DTensor) for p in layer.parameters() if p.grad is not None)


@pytest.mark.behaviour("C-17", "C-04")
def test_flags_are_sent_with_zero_copy_messages_and_in_low_precision() -> None:
    run_ranks(train_unequally_with_direct_messages, 2)
    run_ranks(sum_flags_in_low_precision, 4)
