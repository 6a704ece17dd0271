"""Test the order of unshard, reshard and reduce events in the trace, and that results do not depend on it."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import FSDPModule, PeerError, fully_shard
from composable_fsdp.trace import Operation, Recorder
from tests._internals import ForwardRecord, Planner, group_plan, state_of
from tests.helpers.assert_trace import assert_trace, ledger, peak_groups
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.run_ranks import on_ranks
from tests.helpers.transports import SOCKETS, TRANSPORTS

PARAMETERS = (Operation.UNSHARD, Operation.WAIT, Operation.RESHARD)
SCHEDULE = (*PARAMETERS, Operation.REDUCE)


@pytest.mark.behaviour("C-01", "C-08")
@on_ranks(2, environment=SOCKETS)
def test_the_second_iteration_prefetches_in_recorded_order_and_backward_in_reverse() -> None:
    task, rank = TASKS["mlp"], dist.get_rank()
    model = shard_layers(task.build(), fully_shard, fuses=False)
    forwards, backwards = [], []
    for step in range(3):
        with Recorder() as forward:
            loss = task.loss(model, task.batch_of(step, rank))
        with Recorder() as backward:
            loss.backward()
        forwards.append(forward)
        backwards.append(backward)
    assert_trace(
        forwards[0],
        "unshard root; wait root; unshard layers.0",  # the order is not known yet
        "wait layers.0; reshard layers.0; unshard layers.1; wait layers.1; reshard layers.1; unshard layers.2",
        "wait layers.2; reshard layers.2",
    )
    for forward in forwards[1:]:
        assert_trace(
            forward,
            "unshard root; unshard layers.0",  # in flight while the root computes
            "wait root; wait layers.0; unshard layers.1; reshard layers.0; wait layers.1; unshard layers.2",
            "reshard layers.1; wait layers.2; reshard layers.2",
        )
    for backward in backwards:
        assert_trace(
            backward,
            # The root was kept. Its only own gradient is ready at once and is reduced while layers.2 is gathered.
            "unshard layers.2; reduce root; wait layers.2; unshard layers.1; reduce layers.2; reshard layers.2",
            "wait layers.1; unshard layers.0; reduce layers.1; reshard layers.1; wait layers.0; reshard layers.0",
            "reduce layers.0; reshard root",
            operations=SCHEDULE,
        )
        assert sorted(str(e) for e in backward if e.operation is Operation.REDUCED) == [
            f"reduced {group}" for group in ("layers.0", "layers.1", "layers.2", "root")
        ]


@pytest.mark.behaviour("C-05")
@on_ranks(2, environment=SOCKETS)
def test_a_group_whose_inputs_need_no_gradient_is_reduced_before_the_next_ones_backward() -> None:
    task, rank = TASKS["routed"], dist.get_rank()
    model = task.build()
    fully_shard(model.get_submodule("side"))
    shard_layers(model, fully_shard, fuses=False)
    for step in range(2):
        loss = task.loss(model, task.batch_of(step, rank))
        with Recorder() as backward:
            loss.backward()
        assert_trace(
            backward,
            "unshard side; unshard layers.3; wait side; reshard side; reduce side; wait layers.3; unshard layers.2",
            "reduce layers.3; reshard layers.3; wait layers.2; unshard layers.1; reduce layers.2; reshard layers.2",
            "wait layers.1; unshard layers.0; reduce layers.1; reshard layers.1; wait layers.0; reshard layers.0",
            "reduce layers.0; reshard root",
            operations=SCHEDULE,
        )


@pytest.mark.behaviour("C-08")
@on_ranks(2)
def test_a_prefetched_group_that_did_not_run_is_resharded_at_the_end_of_forward() -> None:
    task, rank = TASKS["routed"], dist.get_rank()
    model = task.build()
    shard_layers(model, fully_shard, fuses=False)
    task.loss(model, task.batch_of(0, rank)).backward()
    model.zero_grad()
    model.route = [0, 1, 2]
    with Recorder() as forward, torch.no_grad():  # without gradients the root is not kept either
        model(task.batch_of(1, rank)[0])
    events = [str(event) for event in forward if event.operation in PARAMETERS]
    assert [event for event in events if event.endswith("layers.3")] == ["unshard layers.3", "reshard layers.3"]
    assert events[-1] == "reshard layers.3"
    assert ledger(forward) == {}
    task.loss(model, task.batch_of(2, rank)).backward()
    assert all(p.grad is None for p in model.layers[3].parameters())
    assert all(p.grad is not None for p in model.layers[2].parameters())


class Embedded(nn.Module):
    """The root's only own parameters get their gradients last."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.skipped = nn.Linear(4, 4)
        self.skips = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        if not self.skips:
            x = self.skipped(x)
        return x


@pytest.mark.behaviour("C-03")
@on_ranks(2, environment=SOCKETS)
def test_a_root_is_freed_before_its_reduction_if_all_other_backwards_are_done() -> None:
    model: Any = Embedded()
    for layer in (*model.layers, model.skipped):
        fully_shard(layer)
    fully_shard(model)
    model.set_schedule(max_fused_bytes=0)
    for skips, order in ((False, ["reshard root", "reduce root"]), (True, ["reduce root", "reshard root"])):
        model.skips = skips
        loss = model(torch.arange(8)).square().mean()
        with torch.no_grad():
            model(torch.arange(8))
        with Recorder() as backward:
            loss.backward()
        assert [e for e in map(str, backward) if e in order] == order, skips


@pytest.mark.behaviour("C-08")
@on_ranks(2, environment=SOCKETS)
def test_the_prefetch_depth_can_be_bounded() -> None:
    task, rank = TASKS["chain"], dist.get_rank()
    model = shard_layers(task.build(), fully_shard, fuses=False)
    layer_bytes = max(e.group.plan.unsharded_bytes for e in map(state_of, model.get_submodule("layers").children()))

    def count_peak_groups() -> int:
        with Recorder() as recorder:
            task.loss(model, task.batch_of(0, rank)).backward()
        return peak_groups(recorder)

    count_peak_groups()  # records the order
    assert count_peak_groups() == 2
    for limit, expected in ((0, 1), (2 * layer_bytes - 1, 1), (2 * layer_bytes, 2), (None, 2)):
        model.set_schedule(max_unsharded_bytes=limit)
        assert count_peak_groups() == expected, limit
    for ahead, expected in ((0, 1), (2, 3), (8, 4), (1, 2)):
        model.set_schedule(prefetch_limit=ahead)
        assert count_peak_groups() == expected, ahead
    model.set_schedule(prefetch_limit=3, max_unsharded_bytes=3 * layer_bytes)
    assert count_peak_groups() == 3, "both limits apply"


STEPS = 4
Expect = Callable[[list[group_plan.Event], random.Random], list[group_plan.Event]]


def expect_nothing(order: list[group_plan.Event], draws: random.Random) -> list[group_plan.Event]:
    return []


def expect_another_order(order: list[group_plan.Event], draws: random.Random) -> list[group_plan.Event]:
    """Return each group of ``order`` at a random position, some groups twice and some never."""
    groups = list(dict.fromkeys(event.group for event in order))
    drawn = draws.choices(groups, k=len(groups) + 1) if groups else []
    both = (group_plan.Hook.PRE_FORWARD, group_plan.Hook.POST_FORWARD)
    return [group_plan.Event(hook, group) for group in drawn for hook in both]


def train(task_name: str, expect: Expect | None, options: dict[str, Any]) -> tuple[list[bytes], int]:
    """Train, and return the bytes of losses, gradients and parameters, and the number of eagerly served runs."""
    task, rank, draws, eager = TASKS[task_name], dist.get_rank(), random.Random(0), []
    begin, run = Planner.begin_forward, Planner.eager

    def begin_forward(self: Planner, outermost: Any, **arguments: Any) -> None:
        known = self.known
        if expect is not None:
            wrong = ForwardRecord()
            wrong.events = expect(self.last_known.events, draws)
            self.known = {outermost: wrong}
        begin(self, outermost, **arguments)
        self.known = known

    def eager_run(self: Planner, *arguments: Any, **more: Any) -> Any:
        eager.append(arguments)
        return run(self, *arguments, **more)

    Planner.begin_forward, Planner.eager = begin_forward, eager_run  # type: ignore[method-assign]
    try:
        model = shard_layers(task.build(), fully_shard)
        schedule, setters = dict(options), cast(Any, model)
        setters.set_reshard_after_backward(schedule.pop("reshard_after_backward", True))
        setters.set_schedule(**schedule)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        seen = []
        for step in range(STEPS):
            loss = task.loss(model, task.batch_of(step, rank))
            loss.backward()
            seen.append(loss.detach())
            seen += [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        seen += [p.to_local().clone() for p in model.parameters()]
        return [each.detach().numpy().tobytes() for each in seen], len(eager)
    finally:
        Planner.begin_forward, Planner.eager = begin, run  # type: ignore[method-assign]


@pytest.mark.behaviour("C-01")
@pytest.mark.parametrize(
    ("task", "options", "transport"),
    [
        ("mlp", {"max_fused_bytes": 0}, "sockets"),
        *(("transformer", {"prefetch_limit": 3}, transport) for transport in TRANSPORTS),
        ("transformer", {"max_unsharded_bytes": 1000, "reshard_after_backward": False}, "in common"),
    ],
)
@on_ranks(2, environment="transport")
def test_results_do_not_depend_on_the_expected_order(task: str, options: dict[str, Any]) -> None:
    expected, usual = train(task, None, options)
    for expect in (expect_nothing, expect_another_order):
        found, eager = train(task, expect, options)
        assert found == expected, expect.__name__
        assert eager > usual, "some events must be unexpected"


WIDTH = 16


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.fails = nn.Linear(WIDTH, WIDTH), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        if self.fails:
            raise ArithmeticError
        return out


@on_ranks(2, timeout=40)
def test_a_forward_that_failed_on_one_rank_leaves_no_order() -> None:
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), Last())
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    x = torch.ones(1, WIDTH)
    last = model[-1]
    last.fails = dist.get_rank() == 1
    with suppress(ArithmeticError, PeerError):
        model(x).sum().backward()
    last.fails = False
    model.reset_iter_state()
    for _ in range(2):
        model(x).sum().backward()
