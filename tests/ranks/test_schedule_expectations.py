"""Test that results do not depend on the schedule: wrong or missing expectations give the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from composable_fsdp import FSDPModule, fully_shard
from tests._internals import ForwardRecord, Planner, events
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.run_ranks import run_ranks
from tests.helpers.transports import TRANSPORTS

STEPS = 4
Expect = Callable[[list[events.Event], random.Random], list[events.Event]]


def expect_nothing(order: list[events.Event], draws: random.Random) -> list[events.Event]:
    return []


def expect_another_order(order: list[events.Event], draws: random.Random) -> list[events.Event]:
    """Return each group of ``order`` at a random position, some groups twice and some never."""
    groups = list(dict.fromkeys(event.group for event in order))
    drawn = draws.choices(groups, k=len(groups) + 1) if groups else []
    both = (events.Hook.PRE_FORWARD, events.Hook.POST_FORWARD)
    return [events.Event(hook, group) for group in drawn for hook in both]


def train(task_name: str, expect: Expect | None, options: dict[str, Any]) -> tuple[list[bytes], int]:
    """Train, and return the bytes of losses, gradients and parameters, and the number of eagerly served runs.

    ``expect`` changes the order that each forward expects, in the same way on all ranks.
    """
    task, rank, draws, eager = TASKS[task_name], dist.get_rank(), random.Random(0), []
    begin, run = Planner.begin_forward, Planner.eager

    def begin_forward(self: Planner, **arguments: Any) -> None:
        if expect is not None:
            wrong = ForwardRecord()
            wrong.events = expect(self.known.events, draws)
            known, self.known = self.known, wrong
            begin(self, **arguments)
            self.known = known
        else:
            begin(self, **arguments)

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
            seen += [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        seen += [p.to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]
        return [each.detach().numpy().tobytes() for each in seen], len(eager)
    finally:
        Planner.begin_forward, Planner.eager = begin, run  # type: ignore[method-assign]


def compare_expectations(task_name: str, options: dict[str, Any]) -> None:
    expected, usual = train(task_name, None, options)
    for expect in (expect_nothing, expect_another_order):
        found, eager = train(task_name, expect, options)
        assert found == expected, expect.__name__
        assert eager > usual, "some events must be unexpected"


@pytest.mark.behaviour("C-01")
@pytest.mark.parametrize(
    ("task", "options", "transport"),
    [
        ("mlp", {"max_fused_bytes": 0}, "sockets"),
        *(("transformer", {"prefetch_limit": 3}, transport) for transport in TRANSPORTS),
        ("transformer", {"max_unsharded_bytes": 1000, "reshard_after_backward": False}, "in common"),
    ],
)
def test_results_do_not_depend_on_the_expected_order(task: str, options: dict[str, Any], transport: str) -> None:
    run_ranks(compare_expectations, 2, task, options, environment=TRANSPORTS[transport])
