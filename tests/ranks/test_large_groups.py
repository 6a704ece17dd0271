"""Large groups: each has one reduction in a backward, in the same order on every rank, whatever ranks use of them."""

from __future__ import annotations

from functools import partial
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable_fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, no_sync
from composable_fsdp.trace import Operation, Recorder
from tests._internals import state_of
from tests.helpers.large_weights import WIDTH, Tower, batch, play, use_different_weights
from tests.helpers.run_ranks import run_ranks
from tests.helpers.training import check_parity
from tests.helpers.transports import SOCKETS, TRANSPORTS, Environment


@pytest.mark.behaviour("C-01")
@pytest.mark.parametrize("transport", TRANSPORTS.values(), ids=TRANSPORTS)
def test_large_groups_train_like_the_unsharded_model(transport: Environment) -> None:
    run_ranks(train_tower, 2, environment=transport)


def train_tower() -> None:
    for keep in (False, True):
        shard = partial(fully_shard, reshard_after_forward=not keep)
        check_parity(Tower, play, shard=shard, steps=3)


def accumulate(sharded: bool) -> None:
    def play_several(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        total = torch.zeros(())
        for i in range(3):
            if isinstance(model, FSDPModule) and i < 2:
                with no_sync(model, sharded=sharded):
                    total += play(model, 3 * step + i, rank)
            else:
                total += play(model, 3 * step + i, rank)
        return total

    check_parity(Tower, play_several, shard=fully_shard, steps=2)


@pytest.mark.behaviour("C-07")
@pytest.mark.parametrize("sharded", [False, True])
def test_large_groups_accumulate_like_the_unsharded_model(sharded: bool) -> None:
    run_ranks(accumulate, 2, sharded)


def tower_with_a_trained_middle() -> Tower:
    model = Tower()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "floors.2.weight")
    return model


def train_middle_weight_only() -> None:
    check_parity(tower_with_a_trained_middle, play, shard=fully_shard, steps=2)


@pytest.mark.behaviour("C-05")
def test_a_large_group_with_one_trained_weight_trains_like_the_unsharded_model() -> None:
    run_ranks(train_middle_weight_only, 2, environment=SOCKETS)


@pytest.mark.behaviour("C-17")
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("transport", TRANSPORTS.values(), ids=TRANSPORTS)
def test_ranks_with_different_used_weights_reduce_together(world_size: int, transport: Environment) -> None:
    run_ranks(use_different_weights, world_size, environment=transport)


class Around(nn.Module):
    """Runs a tower before and after another one. ``used`` lists the weights of its first run."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))  # so that the tower's inputs have gradients
        self.outer, self.inner = Tower(), Tower()
        self.used = [0, 1, 2, 3]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.outer.used = self.used
        x = self.inner(self.outer(x * self.scale))
        self.outer.used = [0, 1, 2, 3]
        return cast(torch.Tensor, self.outer(x))


def run_twice_around_another() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model, reference = Around(), Around()
    for tower in (model.outer, model.inner):
        fully_shard(tower)
    fully_shard(model)
    expected: dict[str, torch.Tensor] = {}
    for other in range(size):
        reference.zero_grad()
        reference.used = [0, 1, 2, 3] if other else [0, 1, 2]
        play(reference, 0, other)
        for name, parameter in reference.named_parameters():
            if parameter.grad is not None:
                expected[name] = expected.get(name, torch.zeros_like(parameter)) + parameter.grad / size
    model.used = [0, 1, 2, 3] if rank else [0, 1, 2]
    play(model, 0, rank)
    model.zero_grad()
    with Recorder() as recorder:
        play(model, 0, rank)
    order = [e.group for e in recorder if e.operation is Operation.REDUCE]
    assert order[:2] == ["inner", "outer"], order
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor), name
        torch.testing.assert_close(parameter.grad.full_tensor(), expected[name])


@pytest.mark.behaviour("C-04", "C-17")
@pytest.mark.parametrize("transport", TRANSPORTS.values(), ids=TRANSPORTS)
def test_a_group_that_runs_before_and_after_another_is_reduced_after_it(transport: Environment) -> None:
    run_ranks(run_twice_around_another, 2, environment=transport)


class Pair(nn.Module):
    """Two consecutive towers. The first one uses the weights ``used``."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))  # so that the towers' inputs have gradients
        self.towers = nn.ModuleList([Tower(), Tower()])

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        first, second = cast(list[Tower], list(self.towers))
        first.used = used
        return cast(torch.Tensor, second(first(x * self.scale)))


def run_two_forwards(model: nn.Module, rank: int) -> None:
    """Run two forwards, then one backward. On rank 0 the last weights have gradients from the second forward only."""
    used = [0, 1, 2, 3] if rank else [0, 1, 2]
    outputs = [model(batch(0, rank), used), model(batch(1, rank), [0, 1, 2, 3])]
    torch.cat(outputs).square().mean().backward()


def run_twice_before_backward() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model, reference = Pair(), Pair()
    for tower in model.towers:
        fully_shard(tower)
    fully_shard(model)
    for other in range(size):
        run_two_forwards(reference, other)
    play_one(model, rank)
    for _ in range(2):
        model.zero_grad()
        run_two_forwards(model, rank)
    check_gradients(model, reference, size)
    assert [state_of(tower).runs for tower in model.towers] == [0, 0]


def check_gradients(model: nn.Module, reference: nn.Module, size: int) -> None:
    """Compare with the gradients of ``reference``, which are the sums over all ranks."""
    for (name, parameter), unsharded in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(parameter.grad, DTensor), name
        assert unsharded.grad is not None
        torch.testing.assert_close(parameter.grad.full_tensor(), unsharded.grad / size)


def play_one(model: nn.Module, rank: int) -> None:
    model(batch(2, rank), [0, 1, 2, 3]).square().mean().backward()


@pytest.mark.behaviour("C-04", "C-17")
@pytest.mark.parametrize("transport", TRANSPORTS.values(), ids=TRANSPORTS)
def test_large_groups_may_run_in_two_forwards_of_one_backward(transport: Environment) -> None:
    run_ranks(run_twice_before_backward, 2, environment=transport)


class Detour(nn.Module):
    """Two consecutive towers. The output of the second one is optional."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))  # so that the towers' inputs have gradients
        self.first, self.second = Tower(), Tower()

    def forward(self, x: torch.Tensor, around: bool) -> torch.Tensor:
        x = self.first(x * self.scale)
        y: torch.Tensor = self.second(x)
        return x if around else y


def go_around_on_one_rank() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model, reference = Detour(), Detour()
    fully_shard(model.first)
    fully_shard(model.second, reshard_after_forward=False)  # so that all ranks gather the same groups, used or not
    fully_shard(model)

    def step(of: nn.Module, microbatch: int, of_rank: int) -> None:
        of(batch(microbatch, of_rank), microbatch == 0 and of_rank == 1).square().mean().backward()

    step(model, 1, rank)
    model.zero_grad()
    with no_sync(model):
        step(model, 0, rank)
    assert state_of(model.first).runs == state_of(model.second).runs == 0, (
        "otherwise ranks would decide differently in the next step"
    )
    step(model, 1, rank)
    for other in range(size):
        for microbatch in range(2):
            step(reference, microbatch, other)
    check_gradients(model, reference, size)


@pytest.mark.behaviour("C-07", "C-17")
@pytest.mark.parametrize("transport", TRANSPORTS.values(), ids=TRANSPORTS)
def test_a_backward_skipped_on_one_rank_leaves_no_state(transport: Environment) -> None:
    run_ranks(go_around_on_one_rank, 2, environment=transport)


def sum_bf16_gradients_in_fp32(microbatches: int) -> None:
    """Check that bf16 gradients are sent in bf16 and summed in fp32 in rank order.

    Accumulated gradients are sent in fp32.
    """
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model, rank, size = Tower(), dist.get_rank(), dist.get_world_size()
    fully_shard(model, mp_policy=precision)
    assert isinstance(model, FSDPModule)
    everyones: list[dict[str, torch.Tensor]] = []
    for other in range(size):
        reference = Tower().bfloat16()
        sums: dict[str, torch.Tensor] = {}
        for i in range(microbatches):
            reference.zero_grad()
            play_bf16(reference, i, other)
            for name, parameter in reference.named_parameters():
                assert parameter.grad is not None
                sums[name] = sums[name] + parameter.grad.float() if name in sums else parameter.grad.float()
        everyones.append(sums)
    with Recorder() as recorder:
        for i in range(microbatches):
            model.set_requires_gradient_sync(i == microbatches - 1)
            play_bf16(model, i, rank)
    sent = sum(e.bytes for e in recorder if e.operation is Operation.REDUCE)
    numel = sum(p.numel() for p in model.parameters())
    itemsize = 2 if microbatches == 1 else 4
    assert itemsize * numel <= sent <= itemsize * (numel + 1000)
    for name, parameter in model.named_parameters():
        total = everyones[0][name].clone()
        for sums in everyones[1:]:
            total += sums[name]
        assert isinstance(parameter.grad, DTensor)
        torch.testing.assert_close(parameter.grad.full_tensor(), total / size, rtol=0, atol=0, msg=name)


def play_bf16(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(step, rank).bfloat16()).float().square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.behaviour("D-01")
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("transport", TRANSPORTS.values(), ids=TRANSPORTS)
def test_16_bit_gradients_are_sent_uncast_and_summed_in_fp32(world_size: int, transport: Environment) -> None:
    for microbatches in (1, 3):
        run_ranks(sum_bf16_gradients_in_fp32, world_size, microbatches, environment=transport)


class TwoHeads(nn.Module):
    """Sharded layers in a root that owns two large heads. Each forward uses one head."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
            self.heads = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: torch.Tensor = self.heads[self.head](x)
        return out


def use_different_heads() -> None:
    rank, model, reference = dist.get_rank(), TwoHeads(), TwoHeads()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for step in range(3):
        expected: dict[str, torch.Tensor] = {}
        for other in range(2):
            reference.zero_grad()
            reference.head = (other + step) % 2
            play(reference, step, other)
            for name, parameter in reference.named_parameters():
                if parameter.grad is not None:
                    expected[name] = expected.get(name, torch.zeros_like(parameter)) + parameter.grad / 2
        model.head = (rank + step) % 2
        model.zero_grad()
        play(model, step, rank)
        for name, parameter in model.named_parameters():
            assert isinstance(parameter.grad, DTensor), name
            torch.testing.assert_close(parameter.grad.full_tensor(), expected[name])


@pytest.mark.behaviour("C-17")
@pytest.mark.parametrize("transport", TRANSPORTS.values(), ids=TRANSPORTS)
def test_ranks_may_use_different_parameters_of_a_group_with_nested_groups(transport: Environment) -> None:
    run_ranks(use_different_heads, 2, environment=transport)
