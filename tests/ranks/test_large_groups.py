"""Large groups: each has one reduction in a backward, in the same order on every rank, whatever ranks use of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import MixedPrecisionPolicy, fully_shard, no_sync
from composable_fsdp.trace import Operation, Recorder
from tests._internals import root_of, state_of
from tests.helpers.large_weights import WIDTH, Tower, batch, use_different_weights
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.transports import COPIES, IN_COMMON, SOCKETS, TRANSPORTS, Environment


@pytest.mark.behaviour("C-17")
@pytest.mark.parametrize(("world_size", "transport"), [(2, COPIES), (4, IN_COMMON), (4, SOCKETS)])
def test_ranks_with_different_used_weights_reduce_together(world_size: int, transport: Environment) -> None:
    run_ranks(use_different_weights, world_size, environment=transport)


def check_gradients(model: Any, reference: Any, size: int) -> None:
    """Compare with the gradients of ``reference``, which are the sums over all ranks."""
    for parameter, unsharded in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), unsharded.grad / size)


class Detour(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))  # so that the towers' inputs have gradients
        self.first, self.second = Tower(), Tower()

    def forward(self, x: torch.Tensor, around: bool) -> torch.Tensor:
        x = self.first(x * self.scale)
        y: torch.Tensor = self.second(x)
        return x if around else y


@pytest.mark.behaviour("C-07", "C-17")
@on_ranks(2, transports=TRANSPORTS)
def test_a_backward_skipped_on_one_rank_leaves_no_state() -> None:
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
    assert not root_of(state_of(model)).progress.forwards, "ranks would decide differently in the next step"
    step(model, 1, rank)
    for other in range(size):
        for microbatch in range(2):
            step(reference, microbatch, other)
    check_gradients(model, reference, size)


def sum_bf16_gradients_in_fp32(microbatches: int) -> None:
    """Check that bf16 gradients are sent in bf16 and summed in fp32 in rank order."""
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    rank, size = dist.get_rank(), dist.get_world_size()
    model: Any = Tower()
    fully_shard(model, mp_policy=precision)
    everyones: list[dict[str, torch.Tensor]] = []
    for other in range(size):
        reference: Any = Tower().bfloat16()
        sums: dict[str, torch.Tensor] = {}
        for i in range(microbatches):
            reference.zero_grad()
            play_bf16(reference, i, other)
            for name, parameter in reference.named_parameters():
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
        torch.testing.assert_close(parameter.grad.full_tensor(), total / size, rtol=0, atol=0, msg=name)


def play_bf16(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(step, rank).bfloat16()).float().square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.behaviour("D-01")
@pytest.mark.parametrize(("world_size", "transport"), [(2, COPIES), (4, IN_COMMON), (4, SOCKETS)])
def test_16_bit_gradients_are_sent_uncast_and_summed_in_fp32(world_size: int, transport: Environment) -> None:
    for microbatches in (1, 3):
        run_ranks(sum_bf16_gradients_in_fp32, world_size, microbatches, environment=transport)
