"""Test that small adjacent groups share one all-gather and one reduce-scatter with unchanged results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from composable_fsdp import FSDPModule, fully_shard
from composable_fsdp.errors import ConfigurationError
from tests._internals import state_of
from tests.helpers.counted_collectives import counted_collectives
from tests.helpers.models import TASKS, Task, seeded, shard_layers, squared_error, vectors
from tests.helpers.run_ranks import on_ranks
from tests.helpers.transports import TRANSPORTS

DEPTH = 12


class Stack(nn.Module):
    """Layers with an increasing number of rows. Few of these numbers divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8 + i, 9 + i) for i in range(DEPTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


STACK = Task(seeded(Stack), vectors(8, 8 + DEPTH), squared_error)


@on_ranks(2, transports=TRANSPORTS)
def test_fused_groups_share_one_gather_each_way_and_one_reduction() -> None:
    model = shard_layers(STACK.build(), fully_shard)
    layers = list(model.get_submodule("layers").children())

    def check_only_this_one_is_unsharded(layer: nn.Module, *_: object) -> None:
        unsharded = [other for other in layers if not isinstance(other.weight, DTensor)]
        assert unsharded in ([], [layer])

    for layer in layers:
        layer.register_forward_pre_hook(check_only_this_one_is_unsharded)
        layer.register_forward_hook(check_only_this_one_is_unsharded)
    gathers, reductions, messages = [], [], []
    for step in range(3):
        with counted_collectives() as counts:
            STACK.loss(model, STACK.batch_of(step, dist.get_rank())).backward()
        gathers.append(counts["all_gather"] + counts["barrier"])
        reductions.append(counts["reduce_scatter"])
        messages.append(counts["reduced"])
    assert reductions == [DEPTH, 1, 1], "groups are fused from the second step on"
    assert messages == [DEPTH, 1, 1]
    assert gathers[0] >= 2 * DEPTH - 1
    assert gathers[1] == gathers[2] <= 4, "one all-gather in each pass, and one barrier at each end"


def freeze_some(layers: Sequence[FSDPModule], step: int) -> None:
    for parameter in layers[3].parameters():  # type: ignore[attr-defined]
        parameter.requires_grad_(step != 2)


def scale_one(layers: Sequence[FSDPModule], step: int) -> None:
    if step == 2:
        layers[2].set_gradient_divide_factor(5.0)


def hook_one(layers: Sequence[FSDPModule], step: int) -> None:
    def scale(gradient: torch.Tensor) -> None:
        gradient.mul_(step)

    layers[0].set_all_reduce_hook(scale)


@pytest.mark.behaviour("C-05", "C-09")
@pytest.mark.parametrize(
    ("choose", "messages"),
    [(freeze_some, (DEPTH, 1, 1, 2)), (scale_one, (DEPTH, 1, DEPTH)), (hook_one, (DEPTH, DEPTH, DEPTH))],
    ids=["one is frozen", "one is scaled", "one has a hook"],
)
@on_ranks(2, 4)
def test_a_setting_of_one_group_applies_to_that_group_only(
    choose: Callable[[Sequence[FSDPModule], int], None], messages: Sequence[int]
) -> None:
    """Check that fused gradients are bitwise equal to unfused ones. ``choose`` changes settings before each step."""
    mesh = init_device_mesh("cpu", (2, 2) if dist.get_world_size() == 4 else (2,))
    fused, alone = (shard_layers(STACK.build(), functools.partial(fully_shard, mesh=mesh)) for _ in range(2))
    alone.set_schedule(max_fused_bytes=0)
    for step, expected in enumerate(messages):
        for model in (fused, alone):
            model.zero_grad()
            choose([state for state in model.modules() if isinstance(state, FSDPModule)][1:], step)
            with counted_collectives() as counts:
                for microbatch in range(1 if step < 3 else 2):
                    model.set_is_last_backward(microbatch == (0 if step < 3 else 1))
                    STACK.loss(model, STACK.batch_of(step + 10 * microbatch, dist.get_rank())).backward()
            if model is fused:
                assert counts["reduced"] == expected, f"step {step}"
        for one, other in zip(fused.parameters(), alone.parameters(), strict=True):
            assert isinstance(one.grad, DTensor) == isinstance(other.grad, DTensor)
            if isinstance(one.grad, DTensor) and isinstance(other.grad, DTensor):
                assert torch.equal(one.grad.to_local(), other.grad.to_local())


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.used = [0, 1, 2, 3]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            out = layer(x)
            x = torch.tanh(out) if i in self.used else x + 0 * out.detach()
        return x


@pytest.mark.behaviour("C-17")
@on_ranks(2)
def test_ranks_may_use_different_groups_of_a_fusion() -> None:
    """Use different layers of fused groups on each rank. Neither rank uses the last layer."""
    rank, task = dist.get_rank(), TASKS["chain"]
    used = {0: [0, 1], 1: [1, 2]}
    model, reference = shard_layers(Gated(), fully_shard), Gated()
    expected: dict[str, torch.Tensor] = {}
    for other in range(2):
        reference.zero_grad()
        reference.used = used[other]
        task.loss(reference, task.batch_of(1, other)).backward()
        for name, parameter in reference.named_parameters():
            if parameter.grad is not None:
                expected[name] = expected.get(name, torch.zeros_like(parameter)) + parameter.grad / 2
    task.loss(model, task.batch_of(0, rank)).backward()  # records the order
    model.zero_grad()
    model.used = used[rank]
    task.loss(model, task.batch_of(1, rank)).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name not in expected), name
        if isinstance(parameter.grad, DTensor):
            torch.testing.assert_close(parameter.grad.full_tensor(), expected[name])


@on_ranks(1)
def test_limits_must_be_numbers() -> None:
    model = shard_layers(STACK.build(), fully_shard)
    for bad in (-1, True, 1.5):
        with pytest.raises(
            ConfigurationError, match=f"max_fused_bytes must be an int of at least 0 or None, not {bad!r}"
        ):
            model.set_schedule(max_fused_bytes=bad)
    for bad in (-1, True, 1.5):
        with pytest.raises(
            ConfigurationError, match=f"max_unsharded_bytes must be an int of at least 0 or None, not {bad!r}"
        ):
            model.set_schedule(max_unsharded_bytes=bad)
        with pytest.raises(ConfigurationError, match=f"^prefetch_limit must be an int .* or None, not {bad!r}"):
            model.set_schedule(prefetch_limit=bad)
    model.set_schedule(max_unsharded_bytes=10)
    assert state_of(model).options.max_unsharded_bytes == 10
