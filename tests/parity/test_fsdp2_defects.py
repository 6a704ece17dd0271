"""Programs that fail on torch's FSDP2, in more settings than in ``test_comparison.py``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from composable_fsdp import MixedPrecisionPolicy, fully_shard
from tests.helpers.run_ranks import run_ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Branches(nn.Module):
    """Has a trunk and an optional branch."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.branch = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, branch: bool = True) -> torch.Tensor:
        x = self.trunk(x)
        return self.branch(x) + x if branch else x


def batch_of(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def seeded(build: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(1)
    return build()


def mean_gradients(reference: nn.Module, losses: Callable[[int], torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """Compute the gradients of the mean of all ranks' losses."""
    reference.zero_grad()
    for rank in range(dist.get_world_size()):
        (losses(rank) / dist.get_world_size()).backward()
    return {name: p.grad for name, p in reference.named_parameters()}


def assert_gradients(
    model: nn.Module, expected: dict[str, torch.Tensor | None], rtol: float = 1.3e-6, atol: float = 1e-5
) -> None:
    for name, p in model.named_parameters():
        gradient: Any = p.grad
        assert (gradient is None) == (expected[name] is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient.full_tensor(), expected[name], rtol=rtol, atol=atol)


# -- mixed precision


def first_used_in_the_last_microbatch() -> None:
    rank = dist.get_rank()
    model = fully_shard(seeded(Branches), mp_policy=BF16)
    reference = seeded(Branches).to(torch.bfloat16)
    model.set_requires_gradient_sync(False)
    model(batch_of(0, rank), branch=False).float().sum().backward()
    model.set_requires_gradient_sync(True)
    model(batch_of(1, rank)).float().sum().backward()

    def loss(other: int) -> torch.Tensor:
        first: torch.Tensor = reference(batch_of(0, other).bfloat16(), branch=False)
        second: torch.Tensor = reference(batch_of(1, other).bfloat16())
        return first.float().sum() + second.float().sum()

    expected = {name: None if g is None else g.float() for name, g in mean_gradients(reference, loss).items()}
    assert_gradients(model, expected, rtol=2e-2, atol=2e-1)


def train_after_frozen_forward() -> None:
    model = fully_shard(seeded(Branches), mp_policy=BF16)
    model.requires_grad_(False)
    model(batch_of(0, dist.get_rank()))
    model.requires_grad_(True)
    model(batch_of(1, dist.get_rank())).float().sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.behaviour("C-07", "D-01")
def test_a_parameter_first_used_in_the_last_microbatch_is_summed_in_the_reduce_dtype() -> None:
    run_ranks(first_used_in_the_last_microbatch, 2)


@pytest.mark.behaviour("C-05", "D-01")
def test_parameters_frozen_in_the_first_forward_and_thawed_later_train() -> None:
    run_ranks(train_after_frozen_forward, 2)


# -- gradients: scale, hooks, recovery


def gradients_of_sum(factor: float | None, sum_only: bool, policy: MixedPrecisionPolicy) -> torch.Tensor:
    model: Any = fully_shard(nn.Linear(4, 4, bias=False), mp_policy=policy)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    model.set_force_sum_reduction_for_comms(sum_only)
    model(torch.full((1, 4), 8.0)).float().sum().backward()
    full: torch.Tensor = model.weight.grad.full_tensor()
    return full


def check_divide_factors() -> None:
    world_size, fp16 = dist.get_world_size(), MixedPrecisionPolicy(reduce_dtype=torch.float16)
    for policy in (MixedPrecisionPolicy(), fp16):
        for sum_only in (False, True):
            for factor in (None, 2.0, 4.0):
                expected = 8.0 * world_size / (factor or world_size)
                got = gradients_of_sum(factor, sum_only, policy)
                torch.testing.assert_close(got, torch.full((4, 4), expected), msg=f"{factor} {sum_only} {policy}")


@pytest.mark.behaviour("C-09")
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gradients_are_divided_once_by_any_factor_on_gloo_and_on_one_rank(world_size: int) -> None:
    run_ranks(check_divide_factors, world_size)


def reset_before_first_run_and_while_accumulating() -> None:
    rank = dist.get_rank()
    model, reference = fully_shard(seeded(Branches)), seeded(Branches)
    model.reset_iter_state()
    model.set_requires_gradient_sync(False)
    model(100 * batch_of(5, rank)).sum().backward()
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    model(batch_of(0, rank)).sum().backward()
    assert_gradients(model, mean_gradients(reference, lambda other: reference(batch_of(0, other)).sum()))


@pytest.mark.behaviour("C-07", "H-01")
def test_a_reset_discards_accumulated_gradients_and_is_legal_before_the_first_forward() -> None:
    run_ranks(reset_before_first_run_and_while_accumulating, 2)


# -- layouts


def columns_on_a_smaller_mesh() -> None:
    rank = dist.get_rank()

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 5))

    model, reference = seeded(build), seeded(build)
    for layer in (model[0], model[2]):
        fully_shard(layer, reshard_after_forward=2, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else Shard(0))
    fully_shard(model)
    before = {name: p.detach().clone() for name, p in reference.named_parameters()}
    loss = model(torch.randn(3, 8, generator=torch.Generator().manual_seed(rank))).square().sum()
    for name, p in model.named_parameters():  # between forward and backward
        torch.testing.assert_close(p.full_tensor(), before[name])
    loss.backward()
    batches = [torch.randn(3, 8, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    assert_gradients(model, mean_gradients(reference, lambda other: reference(batches[other]).square().sum()))


@pytest.mark.behaviour("A-05", "C-01")
def test_uneven_columns_kept_on_a_smaller_mesh_are_right_between_forward_and_backward() -> None:
    run_ranks(columns_on_a_smaller_mesh, 4)


def run_extra_forward_before_step() -> None:
    rank = dist.get_rank()

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    model, reference = seeded(build), seeded(build)
    for layer in model:
        fully_shard(layer, reshard_after_forward=2)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(batch_of(0, rank)).square().sum().backward()
    model(batch_of(9, rank))  # creates slices of the old parameters
    optimizer.step()
    mean_gradients(reference, lambda other: reference(batch_of(0, other)).square().sum())
    torch.optim.SGD(reference.parameters(), lr=0.5).step()
    torch.testing.assert_close(model(batch_of(1, rank)), reference(batch_of(1, rank)))


@pytest.mark.behaviour("C-01")
def test_slices_kept_on_a_smaller_mesh_are_not_stale_after_an_optimizer_step() -> None:
    run_ranks(run_extra_forward_before_step, 4)


# -- gloo


FUNCTIONAL_ALL_GATHERS = """
import sys, time, torch, torch.distributed as dist
if sys.argv[1] == "replaced":
    import composable_fsdp; composable_fsdp.fully_shard
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ops, group, x = torch.ops._c10d_functional, dist.group.WORLD.group_name, torch.ones(4)
end = time.monotonic() + 5.0
while time.monotonic() < end:
    for result in [ops.all_gather_into_tensor(x, 1, group) for _ in range(64)]:
        assert torch.equal(ops.wait_tensor(result), x)
"""
"""A process without other ranks, with up to 64 all-gathers of functional collectives over gloo at once."""


def end_of_functional_all_gathers(which: str) -> int:
    command = [sys.executable, "-c", FUNCTIONAL_ALL_GATHERS, which]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(command, env=environment, capture_output=True, timeout=120.0).returncode


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="looked at in torch 2.13")
def test_functional_all_gathers_of_torch_over_gloo_free_memory_twice() -> None:
    """If this fails, torch has mended it: ``plugins/gloo/functional_all_gather.py`` is not needed with that release."""
    ends = (end_of_functional_all_gathers("torch's own") for _ in range(8))
    assert any(end in (-signal.SIGABRT, -signal.SIGSEGV) for end in ends)


@pytest.mark.behaviour("H-03")
def test_functional_all_gathers_are_replaced_by_ones_that_free_it_once() -> None:
    assert end_of_functional_all_gathers("replaced") == 0


def gather_tensors_of_all_kinds() -> None:
    rank, size, ops = dist.get_rank(), dist.get_world_size(), torch.ops._c10d_functional
    group = dist.distributed_c10d._get_default_group().group_name
    for shape in ((1,), (3, 2), (0, 4), (2, 3, 2)):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
            own = [torch.full(shape, r + 1).to(dtype) for r in range(size)]
            gathered = ops.wait_tensor(ops.all_gather_into_tensor(own[rank], size, group))
            torch.testing.assert_close(gathered, torch.cat(own))


@pytest.mark.behaviour("H-03")
def test_replaced_functional_all_gathers_return_what_torchs_do() -> None:
    run_ranks(gather_tensors_of_all_kinds, 2)
