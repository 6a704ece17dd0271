"""Parameters with few rows, which are all-reduced instead of padded, train like all others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from composable_fsdp import MixedPrecisionPolicy, communication_report, fully_shard
from composable_fsdp.testing import run_ranks
from composable_fsdp.trace import Operation, Recorder
from tests._internals import PlanOptions, ProcessGroups, state_of
from tests.helpers.counted_collectives import COMMUNICATORS
from tests.helpers.peak_memory import peak_above_idle
from tests.helpers.transports import COPIES, IN_COMMON, SOCKETS

STEPS = 3


class Narrow(nn.Module):
    """On 2 and 4 ranks, most ranks have empty shards of most parameters, but none of ``up`` and ``out``."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(6, 1)
        self.up = nn.Linear(1, 64)
        self.out = nn.Linear(64, 6)
        self.scale = nn.Parameter(torch.linspace(1, 2, 6).view(2, 3))
        self.spare = nn.Parameter(torch.linspace(-1, 1, 6).view(1, 6))

    def forward(self, x: torch.Tensor, *, spare: bool) -> torch.Tensor:
        x = x + self.spare if spare else x
        return torch.as_tensor(self.out(torch.tanh(self.up(self.down(x)))) * self.scale.view(6))


class Stack(nn.Module):
    """``spare`` parameters are used by rank 1 in the second step and by all in the third one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([Narrow() for _ in range(3)])

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, spare=step == 2 or (step == 1 and dist.get_rank() == 1))
        return x


@contextmanager
def all_reduced_from(nbytes: int) -> Iterator[None]:
    """Make padding of ``nbytes`` worth an all-reduce, on every communicator."""
    original = ProcessGroups.plan_options

    def patched(self: ProcessGroups) -> PlanOptions:
        options = original(self)
        return dataclasses.replace(options, all_reduce_bytes=nbytes, reduce_whole_bytes=nbytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessGroups, "plan_options", patched)
        yield


def shard(model: Stack, **options: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def plain() -> Any:
    return shard(Stack())


def hybrid() -> Any:
    return shard(Stack(), mesh=init_device_mesh("cpu", (2, 2)))


def bf16() -> Any:
    return shard(Stack(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))


def fp16_is_divided_before_and_after() -> Any:
    return shard(Stack(), mp_policy=MixedPrecisionPolicy(torch.float16, torch.float16))


def other_factor() -> Any:
    model = plain()
    for layer in (model, *model.layers):
        layer.set_gradient_divide_factor(3.0)
    return model


def from_a_smaller_mesh() -> Any:
    return shard(Stack(), reshard_after_forward=2)


def on_the_last_dim() -> Any:
    return shard(Stack(), shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))


def each_by_itself() -> Any:
    model = plain()
    model.set_max_fused_bytes(0)
    return model


def synchronized(model: Any, *, last: bool) -> None:
    model.set_requires_gradient_sync(last)


def reduced_on_one_axis(model: Any, *, last: bool) -> None:
    model.set_requires_all_reduce(last)


def always(model: Any, *, last: bool) -> None:
    """Return that every microbatch is reduced."""


VARIANTS: dict[str, tuple[Callable[[], Any], Callable[..., None]]] = {
    "plain": (plain, always),
    "hybrid": (hybrid, always),
    "bf16": (bf16, always),
    "fp16": (fp16_is_divided_before_and_after, always),
    "other factor": (other_factor, always),
    "smaller mesh": (from_a_smaller_mesh, always),
    "last dim": (on_the_last_dim, always),
    "not merged": (each_by_itself, always),
    "accumulated": (plain, synchronized),
    "hybrid, accumulated": (hybrid, reduced_on_one_axis),
}


def train(variant: str) -> tuple[Any, list[torch.Tensor]]:
    """Return the model, and all gradients and parameters after each step."""
    build, prepare = VARIANTS[variant]
    model, seen = build(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for microbatch in range(2):
            prepare(model, last=microbatch == 1)
            seed = 100 * step + 10 * microbatch + dist.get_rank()
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
            model(x, step).float().square().mean().backward()
        seen += [parameter.grad.full_tensor() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        seen += [parameter.full_tensor().detach() for parameter in model.parameters()]
    return model, seen


def check_all_reduced(model: Any, expected: set[str]) -> None:
    """Check that these parameters, or none, are all-reduced both ways, and never those with rows on all ranks."""
    for layer in model.layers:
        plan = state_of(layer).group.plan
        gathered = {plan.specs[b.indices[i]].name for b in plan.buckets for i in b.gather.all_reduced}
        reduced = {plan.specs[b.indices[b.reduce.indices[k]]].name for b in plan.buckets for k in b.reduce.all_reduced}
        assert gathered == reduced
        assert "out.weight" not in gathered
        assert gathered >= expected
        assert bool(gathered) == bool(expected)


def compare(variant: str, *, bitwise: bool) -> None:
    padded, expected = train(variant)
    check_all_reduced(padded, set())
    with all_reduced_from(0):
        model, actual = train(variant)
        check_all_reduced(
            model, {"up.weight", "down.bias"} if variant == "last dim" else {"down.weight", "down.bias", "spare"}
        )
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        tolerance = 0.0 if bitwise else 1e-6
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.behaviour("A-04")
@pytest.mark.parametrize("variant", VARIANTS)
def test_all_reduced_parameters_train_to_the_same_bits(variant: str) -> None:
    """With shared memory, an in-place sum is also in the order of ranks."""
    run_ranks(compare, 4, variant, bitwise=True, environment=COPIES)


@pytest.mark.parametrize("variant", ["plain", "hybrid, accumulated"])
def test_over_gloo_only_the_order_of_sums_differs(variant: str) -> None:
    run_ranks(compare, 4, variant, bitwise=False, environment=SOCKETS)


def in_common_the_gather_moves_nothing() -> None:
    with all_reduced_from(0):
        plans = [bucket.plan for layer in plain().layers for bucket in state_of(layer).group.buckets]
    assert all(plan.aliased and not plan.gather.all_reduced and plan.reduce.all_reduced for plan in plans)


def test_parameters_in_shared_memory_are_not_all_reduced() -> None:
    run_ranks(in_common_the_gather_moves_nothing, 4, environment=IN_COMMON)


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Return the output bytes of all-gathers, the input bytes of reduce-scatters, and twice those reduced in place."""
    moved: list[int] = []

    def counting(communicator: type, name: str, size_of: Callable[[Any], int]) -> Callable[..., Any]:
        original = getattr(communicator, name)

        def call(self: object, tensors: Any, *args: Any) -> Any:
            if not str(args[-1]).startswith("comparison of"):  # the comparison of models, before the first forward
                moved.extend(map(size_of, tensors))
            return original(self, tensors, *args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for kind in COMMUNICATORS:
            patch.setattr(kind, "all_gather", counting(kind, "all_gather", lambda t: int(t.output.nbytes)))
            patch.setattr(kind, "reduce_scatter", counting(kind, "reduce_scatter", lambda t: int(t.input.nbytes)))
            patch.setattr(kind, "all_reduce", counting(kind, "all_reduce", lambda t: 2 * int(t.nbytes)))
        yield moved


def count_what_moves() -> None:
    with all_reduced_from(0):
        model = each_by_itself()
        with counted_bytes() as moved, Recorder() as recorder:
            model(torch.ones(5, 6), 2).sum().backward()
    recorded = [event for event in recorder.events if event.operation in (Operation.UNSHARD, Operation.REDUCE)]
    assert sum(moved) == sum(event.bytes for event in recorded)
    assert all(event.bytes == event.plain_bytes for event in recorded)
    assert communication_report(model).bytes == sum(moved) * 3 // 4


def test_the_trace_and_the_report_count_the_bytes_sent() -> None:
    run_ranks(count_what_moves, 4, environment=COPIES)


def test_at_4096_ranks_a_step_takes_no_memory_for_padding() -> None:
    """The peak is two unsharded blocks, gradients of one and their message; padding of 64 and 256 rows adds none."""
    width, ranks = 64, 4096
    dist.init_process_group("fake", store=FakeStore(), rank=ranks // 3, world_size=ranks)
    try:
        blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width)) for _ in range(5)]
        full_bytes = sum(parameter.nbytes for parameter in blocks[0].parameters())
        model = nn.Sequential(*blocks)
        for block in blocks:
            fully_shard(block)
        root: Any = fully_shard(model)
        root.set_max_fused_bytes(0)
        peak = peak_above_idle(root, torch.zeros(1, width))
    finally:
        dist.destroy_process_group()
    assert 4 * full_bytes <= peak <= 4 * full_bytes + 8192, "only activations use more"
