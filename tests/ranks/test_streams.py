"""Test schedules on a device with streams, simulated in virtual time with real communication.

Unlike on the host, the last groups stay unsharded for backward, and several reductions are in flight.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import fully_shard
from composable_fsdp.trace import Operation, Recorder
from tests._internals import ParameterState, backward, state_of
from tests.helpers.large_weights import WIDTH, Tower, batch, play
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.run_ranks import on_ranks
from tests.helpers.training import check_parity
from tests.helpers.transports import COPIES, SOCKETS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@contextmanager
def streams() -> Iterator[None]:
    """Simulate streams on ``torch.cpu`` inside the context. Small messages are treated like large ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        sim = importlib.import_module("sim.device")
        with sim.Device(flops=1.0, bandwidth=1.0).installed(), mock.patch.object(backward, "_MIN_BYTES_IN_FLIGHT", 0):
            yield


def towers() -> nn.Sequential:
    return nn.Sequential(*(Tower() for _ in range(3)))


def shard_towers(model: Any, ahead: int = 1) -> None:
    for tower in model.children():
        fully_shard(tower)
    fully_shard(model)
    model.set_schedule(prefetch_limit=ahead)


@pytest.mark.behaviour("C-01")
@pytest.mark.parametrize(("ahead", "transport"), [(0, COPIES), (1, SOCKETS), (3, COPIES)])
@on_ranks(2, environment="transport")
def test_streams_train_like_the_unsharded_model(ahead: int) -> None:
    with streams():
        check_parity(towers, play, shard=partial(shard_towers, ahead=ahead), steps=3)


@on_ranks(2, environment=SOCKETS)
def test_fused_groups_on_streams_are_reduced_one_after_the_other() -> None:
    task, rank = TASKS["chain"], dist.get_rank()
    with streams():
        model = shard_layers(task.build(), fully_shard, fuses=False)
        for step in range(2):
            task.loss(model, task.batch_of(step, rank)).backward()
        with Recorder() as recorder:
            task.loss(model, task.batch_of(2, rank)).backward()
        operations = [e.operation for e in recorder if e.operation in (Operation.REDUCE, Operation.REDUCED)]
        assert operations == [Operation.REDUCE, Operation.REDUCED] * 4, "a group waits for the reduction before it"
        with mock.patch.object(backward, "_MIN_BYTES_IN_FLIGHT", 1 << 20), Recorder() as recorder:
            task.loss(model, task.batch_of(3, rank)).backward()
        operations = [e.operation for e in recorder if e.operation in (Operation.REDUCE, Operation.REDUCED)]
        assert operations == [Operation.REDUCE] * 4 + [Operation.REDUCED] * 4, (
            "small reductions may be in flight together"
        )


@on_ranks(2, environment=SOCKETS)
def test_small_groups_on_streams_do_not_wait_for_large_ones() -> None:
    """Reduce a small group, with less than an eighth of the large group's bytes, after the large group."""
    rank = dist.get_rank()
    with streams():
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH // 3), nn.Linear(WIDTH // 3, WIDTH), Tower())
        for module in model:
            fully_shard(module)
        fully_shard(model)
        for step in range(2):
            play(model, step, rank)
        with Recorder() as recorder:
            play(model, 2, rank)
    events = [str(e) for e in recorder if e.operation in (Operation.REDUCE, Operation.REDUCED)]
    assert events[:3] == ["reduce 2", "reduce 1", "reduced 2"], events


@pytest.mark.parametrize("pending", ["two forwards", "a forward without a backward"])
@on_ranks(2, environment=SOCKETS)
def test_a_forward_of_another_backward_does_not_defer_reductions(pending: str) -> None:
    """With one more forward than backwards, as in 1F1B or after a validation, each group is still reduced at once."""

    def order_of(loss: torch.Tensor) -> list[str]:
        with Recorder() as recorder:
            loss.backward()
        return [str(event) for event in recorder if event.operation in (Operation.RESHARD, Operation.REDUCE)]

    with streams():
        model: Any = towers()
        shard_towers(model)
        batches = [batch(step, dist.get_rank()) for step in range(2)]
        for step in range(2):
            play(model, step, dist.get_rank())
        usual = order_of(model(batches[0].requires_grad_()).sum())
        first, second = (model(x.requires_grad_()).sum() for x in batches)
        assert order_of(first if pending == "two forwards" else second) == usual
        if pending == "two forwards":
            assert order_of(second) == usual
        assert order_of(model(batches[1]).sum()) == usual


@on_ranks(2, environment=SOCKETS)
def test_streams_keep_the_groups_that_backward_would_prefetch_first() -> None:
    with streams():
        model: Any = towers()
        shard_towers(model)
        groups = [state_of(tower).group for tower in model.children()]

        def kept() -> list[int]:
            loss = model(batch(0, 0)).sum()
            states = [group.parameter_state for group in groups]
            loss.backward()
            assert {group.parameter_state for group in groups} == {ParameterState.SHARDED}
            return [i for i, state in enumerate(states) if state is ParameterState.UNSHARDED]

        kept()  # records the order
        nbytes = groups[0].plan.unsharded_bytes
        for ahead, most, expected in (
            (1, None, [1, 2]),
            (2, None, [0, 1, 2]),
            (0, None, []),
            (2, nbytes, [2]),
            (2, 0, []),
        ):
            model.set_schedule(prefetch_limit=ahead, max_unsharded_bytes=most)
            assert kept() == expected, (ahead, most)
