"""Backward gathers the next group when it enters a group, within the bound on memory, and in one order on all ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from composable_fsdp import fully_shard
from composable_fsdp.trace import Operation, Recorder
from tests.helpers.assert_trace import assert_trace
from tests.helpers.large_weights import WIDTH, Tower, batch, play
from tests.helpers.peak_memory import peak_above_idle
from tests.helpers.run_ranks import on_ranks
from tests.helpers.transports import COPIES, SOCKETS

ORDER = (Operation.UNSHARD, Operation.WAIT, Operation.REDUCE, Operation.REDUCED)


def towers(number: int = 3, *, ready: bool = True) -> Any:
    blocks = [Tower() for _ in range(number)]
    model: Any = nn.Sequential(*blocks)
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    if ready:
        play(model, 0, dist.get_rank())
        model.zero_grad()
    return model


@pytest.mark.behaviour("C-08")
@pytest.mark.parametrize("transport", [COPIES, SOCKETS], ids=["copies", "sockets"])
@on_ranks(2, environment="transport")
def test_the_next_group_is_gathered_when_backward_enters_a_group() -> None:
    loss = towers()(batch(1, dist.get_rank())).square().mean()
    with Recorder() as recorder:
        loss.backward()
    assert_trace(
        recorder,
        *("unshard 2", "unshard 1", "wait 2", "reduce 2"),
        *("wait 1", "unshard 0", "reduced 2", "reduce 1"),
        *("wait 0", "reduced 1", "reduce 0", "reduced 0"),
        operations=ORDER,
    )


ROUTES = {"all": [0, 1, 2, 3], "not the first batch": [0, 1, 2], "not the third": [0, 2, 3], "not the last": [1, 2, 3]}


@pytest.mark.behaviour("C-17")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("transport", [COPIES, SOCKETS], ids=["copies", "sockets"])
@on_ranks(2, environment="transport")
def test_ranks_with_different_used_parameters_launch_in_one_order(route: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model, reference = towers(), nn.Sequential(*(Tower() for _ in range(3)))

    def follow_route(blocks: Any, of_rank: int) -> None:
        for block in blocks:
            block.used = ROUTES[route if of_rank == 1 else "all"]

    expected: dict[str, torch.Tensor] = {}
    for other in range(size):
        reference.zero_grad()
        follow_route(reference, other)
        play(reference, 1, other)
        for name, parameter in reference.named_parameters():
            if parameter.grad is not None:
                expected[name] = expected.get(name, torch.zeros_like(parameter)) + parameter.grad / size
    follow_route(model, rank)
    with Recorder() as recorder:
        play(model, 1, rank)
    own = [event.group for event in recorder if event.operation is Operation.COLLECTIVE]
    everyones = [own] * size
    dist.all_gather_object(everyones, own)
    assert all(others == own for others in everyones)
    assert own.count("reduce-scatter of 2") == 1
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), expected[name])


@pytest.mark.behaviour("C-03")
def test_two_groups_and_the_gradients_of_one_are_in_memory_together() -> None:
    """Check the peak: two unsharded groups, gradients of one, those of another in flight, and the shards so far."""
    ranks, number = 4, 5
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        model = towers(number, ready=False)
        full_bytes = sum(4 * parameter.numel() for parameter in model[0].parameters())
        peak = peak_above_idle(model, torch.zeros(1, WIDTH))
    finally:
        dist.destroy_process_group()
    assert 0 <= peak - 4 * full_bytes - (number - 2) * full_bytes // ranks <= full_bytes // 16, (
        "only activations use more"
    )


@pytest.mark.behaviour("C-04")
@on_ranks(1)
def test_a_layer_that_ran_before_its_model_is_named_by_its_path() -> None:
    """Run a layer as its own root, then inside the model that renames it, with one backward through both outputs."""
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(740, 740), nn.Tanh(), nn.Linear(740, 740)) for _ in range(2)))
    reference: Any = copy.deepcopy(model)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    x = torch.randn(2, 740, requires_grad=True)
    for each in (model, reference):
        (each[1](x).sum() + each(x).sum()).backward()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)
