"""Steady iterations of randomly drawn models perform exactly the printed schedule."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from composable_fsdp import FSDPModule, fully_shard
from composable_fsdp.trace import Operation, Recorder
from tests._internals import schedule

RANKS, WIDTH = 4, 8


@dataclass(frozen=True)
class Drawn:
    """A drawn model with leaves, blocks around leaves, and sharding options."""

    leaves: tuple[tuple[int, bool, bool | int | None], ...]
    """For each leaf: its hidden size, a flag to shard it by itself, and ``reshard_after_forward``."""
    around: tuple[int, ...]
    """The leaves that have their own block, which is also sharded."""
    own_last: bool
    """The parameters of a block are used after the group inside it, not before it."""
    order: tuple[int, ...]
    limit: int
    max_unsharded: int | None
    max_fused: int
    keeps_after_backward: bool
    frozen: int | None
    is_synced: bool
    input_needs_gradient: bool


LEAF = st.tuples(
    st.sampled_from([1, 8, 4096, 70_000]), st.integers(0, 3).map(bool), st.sampled_from([None, True, False, 2])
)


@st.composite
def models(draw: st.DrawFn) -> Drawn:
    leaves = tuple(draw(st.lists(LEAF, min_size=1, max_size=6)))
    places = st.integers(0, len(leaves) - 1)
    repeats = draw(st.lists(places, max_size=2))
    return Drawn(
        leaves,
        tuple(sorted(draw(st.sets(places, max_size=2)))),
        draw(st.booleans()),
        (*range(len(leaves)), *repeats),
        draw(st.integers(0, 3)),
        draw(st.none() | st.sampled_from([0, 200_000, 5_000_000])),
        draw(st.sampled_from([0, 100_000, 1 << 20])),
        draw(st.booleans()),
        draw(st.none() | places),
        draw(st.integers(0, 3)) > 0,
        draw(st.booleans()),
    )


class Leaf(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, size), nn.Linear(size, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(x))
        return out


class Sequence(nn.Module):
    def __init__(self, parts: list[nn.Module], order: tuple[int, ...]) -> None:
        super().__init__()
        self.parts, self.order = nn.ModuleList(parts), order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.parts[index](x)
        return 2 * x  # so that backward reaches this module before its last child


def build(drawn: Drawn) -> FSDPModule:
    leaves: list[nn.Module] = [Leaf(size) for size, _, _ in drawn.leaves]
    if drawn.frozen is not None:
        leaves[drawn.frozen].requires_grad_(False)
    mesh = init_device_mesh("cpu", (RANKS,))
    for leaf, (_, is_sharded, reshard) in zip(leaves, drawn.leaves, strict=True):
        if is_sharded:
            fully_shard(leaf, mesh=mesh, reshard_after_forward=reshard)
    parts = leaves
    for index in drawn.around:
        inner = [nn.Linear(WIDTH, WIDTH), parts[index]]
        parts[index] = Sequence(inner[::-1] if drawn.own_last else inner, (0, 1))
        fully_shard(parts[index], mesh=mesh)
    model = Sequence([nn.Linear(WIDTH, WIDTH), *parts], (0, *(1 + index for index in drawn.order)))
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)
    model.set_prefetch_limit(drawn.limit)
    model.set_max_unsharded_bytes(drawn.max_unsharded)
    model.set_max_fused_bytes(drawn.max_fused)
    model.set_reshard_after_backward(not drawn.keeps_after_backward)
    model.set_requires_gradient_sync(drawn.is_synced)
    return model


@contextmanager
def fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


def predicted(model: FSDPModule) -> list[str]:
    """Return the trace that the schedule predicts."""
    lines = []
    in_flight: list[schedule.Reduce] = []
    held = set(model.schedule().initially_unsharded)
    for _, actions in model.schedule():
        for action in actions:
            match action:
                case schedule.Gather(groups):
                    lines += [f"unshard {group}" for group in groups]
                case schedule.Wait(group):
                    lines += [] if group in held else [f"wait {group}"]
                    held.add(group)
                case schedule.Free(group) | schedule.Shrink(group, _):
                    lines.append(f"reshard {group}")
                    held.discard(group)
                case schedule.Reduce(buckets):
                    lines += [f"reduce {group}" for group in dict.fromkeys(bucket.group for bucket in buckets)]
                    in_flight.append(action)
                case schedule.WaitReduce(count):
                    for _ in range(count):
                        done = in_flight.pop(0)
                        lines += [f"reduced {group}" for group in dict.fromkeys(b.group for b in done.buckets)]
    return lines


PARAMETERS = ("unshard", "wait", "reshard")


def play(model: FSDPModule, drawn: Drawn) -> Recorder:
    with Recorder() as recorder:
        assert isinstance(model, nn.Module)
        model(torch.ones(1, WIDTH, requires_grad=drawn.input_needs_gradient)).sum().backward()
    return recorder


SHOWN = (Operation.UNSHARD, Operation.WAIT, Operation.RESHARD, Operation.REDUCE, Operation.REDUCED)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, derandomize=True)
@given(models())
def test_a_steady_iteration_performs_what_the_schedule_says(drawn: Drawn) -> None:
    with fake_ranks():
        model = build(drawn)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)  # type: ignore[attr-defined]
        for _ in range(2):
            play(model, drawn)
            if not drawn.is_synced:  # a step without any reduced gradient is refused
                first = optimizer.param_groups[0]["params"][0]
                first.grad = torch.zeros_like(first)
            optimizer.step()
        optimizer.zero_grad()
        expected = predicted(model)
        found = [str(event) for event in play(model, drawn) if event.operation in SHOWN]
        # Parameters kept from the last backward are stale after the optimizer's step and freed when forward begins.
        stale = next((i for i, line in enumerate(found) if not line.startswith("reshard")), 0)
        assert found[stale:] == expected, model.schedule()


def calls_per_group(groups: int) -> float:
    """Return the number of Python calls of a steady step per group. All groups except the root are fused."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(groups)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    inputs, calls = torch.ones(1, 4), 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event == "call"

    for step in range(3):
        if step == 2:
            sys.setprofile(count)
        try:
            model(inputs).sum().backward()
        finally:
            sys.setprofile(None)
    return calls / groups


def test_host_work_is_linear_in_the_number_of_fused_groups() -> None:
    with fake_ranks():
        assert calls_per_group(64) < 1.2 * calls_per_group(16)
