"""Test memory in a training step: the bytes of storages, compared with the ledger of the trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import MixedPrecisionPolicy, fully_shard
from composable_fsdp.trace import Operation, TraceEvent, listeners
from tests._internals import FSDPState, find_state, state_of
from tests.helpers.assert_trace import ledger
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.peak_memory import FULL, LiveStorages
from tests.helpers.rank_process import RanksError
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.training import OPTIMIZERS
from tests.helpers.transports import COPIES, SOCKETS


def states_of(model: nn.Module) -> list[FSDPState]:
    return [state for module in model.modules() if (state := find_state(module)) is not None]


def unsharded_bytes(state: FSDPState) -> int:
    storages = {s._cdata: s.nbytes() for p in state.group.parameters for s in [p.unsharded.untyped_storage()]}
    return sum(storages.values())


WEIGHTS = [768 * 1024 * 4, 1028 * 768 * 4]  # 1027 rows are padded to 1028


def check_gradients(model: Any) -> None:
    for parameter in model.parameters():
        gradient = parameter.grad
        assert (gradient.placements, gradient.device_mesh) == (parameter.placements, parameter.device_mesh)
        assert (gradient.shape, gradient.dtype) == (parameter.shape, parameter.dtype)
        assert gradient.to_local().shape == parameter.to_local().shape
        assert parameter.to_local().shape[0] <= -(-parameter.shape[0] // dist.get_world_size())


@pytest.mark.behaviour("C-03")
@pytest.mark.parametrize(
    ("world_size", "reshard", "transport"),
    [(2, True, SOCKETS), (2, None, COPIES), (2, False, SOCKETS), (4, 2, COPIES)],
)
@on_ranks("world_size", environment="transport")
def test_no_full_parameter_is_in_memory_after_forward_and_after_backward(reshard: bool | int | None) -> None:
    task, rank = TASKS["wide"], dist.get_rank()
    live = LiveStorages()
    model = shard_layers(task.build(), fully_shard, fuses=False, reshard_after_forward=reshard)
    optimizer = OPTIMIZERS["adamw-foreach"](model.parameters())
    kept = WEIGHTS if reshard is False else []
    live.check("after sharding", least=FULL, expected=[])
    for step in range(3):
        loss = task.loss(model, task.batch_of(step, rank))
        live.check("between forward and backward", least=FULL, expected=kept)
        between = [state for state in states_of(model) if unsharded_bytes(state)]
        if reshard is False:
            assert between == states_of(model)
        else:
            assert between == ([state_of(model)] if reshard is None else [])
        if type(reshard) is int:
            slices = [nbytes // reshard for nbytes in WEIGHTS]
            live.check("slices", least=FULL // reshard, expected=slices)
        loss.backward()
        del loss
        live.check("after backward", least=FULL, expected=[])
        assert [unsharded_bytes(state) for state in states_of(model)] == [0, 0, 0]
        check_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(task.batch_of(step, rank)[0])
        live.check("after a forward without gradients", least=FULL, expected=kept)


class CheckedLedger:
    """Compares the allocations in the trace with the storages at every event."""

    def __init__(self, model: nn.Module) -> None:
        self._states = states_of(model)
        self.events: list[TraceEvent] = []
        self.most_unsharded = 0

    def __call__(self, event: TraceEvent) -> None:
        self.events.append(event)
        real = {state.name: nbytes for state in self._states if (nbytes := unsharded_bytes(state))}
        assert real == ledger(self.events), f"after {event}"
        self.most_unsharded = max(self.most_unsharded, len(real))

    def __enter__(self) -> CheckedLedger:
        listeners.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        listeners.remove(self)


def compare_ledger_with_storages(task_name: str, precision: MixedPrecisionPolicy) -> None:
    task, rank = TASKS[task_name], dist.get_rank()
    for reshard in (True, False, None, 2):
        model = shard_layers(task.build(), fully_shard, fuses=False, reshard_after_forward=reshard, mp_policy=precision)
        task.loss(model, task.batch_of(0, rank)).backward()  # sets the names of the groups
        for state in states_of(model):
            state.group.reshard()
        with CheckedLedger(model) as checked:
            for step in range(2):
                task.loss(model, task.batch_of(step, rank)).backward()
            with torch.no_grad():
                model(*task.batch_of(2, rank)[:-1])
            model.unshard()
            model.reshard()
        operations = {event.operation for event in checked.events}
        assert operations == set(Operation)
        if reshard is not False:
            assert ledger(checked.events) == {}


@pytest.mark.behaviour("C-03")
@pytest.mark.parametrize(
    ("world_size", "task", "precision"),
    [(2, "tied", MixedPrecisionPolicy()), (4, "mlp", MixedPrecisionPolicy(param_dtype=torch.bfloat16))],
)
def test_the_ledger_of_the_trace_equals_the_storage_bytes(
    world_size: int, task: str, precision: MixedPrecisionPolicy
) -> None:
    run_ranks(compare_ledger_with_storages, world_size, task, precision, environment=SOCKETS)


class KeepsWeight(nn.Module):
    kept: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        nn.init.ones_(self.linear.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.linear.weight.detach()
        return self.linear(x)


def read_a_kept_reference(how: str) -> None:
    inner = KeepsWeight()
    model = fully_shard(nn.Sequential(fully_shard(inner)))
    model(torch.ones(1, 8)).sum().backward()
    kept = inner.kept
    assert kept.shape == (8, 8)
    if how == "it is there":
        assert torch.equal(kept, torch.ones(8, 8))
    elif how == "torch raises":
        assert kept.untyped_storage().nbytes() == 0
        with pytest.raises(RuntimeError, match=r"storage of size 0"):
            kept[0]
        with pytest.raises(RuntimeError, match=r"data is not allocated"):
            torch.ones(1, 8) @ kept
    else:
        kept.sum()


@pytest.mark.behaviour("C-03")
def test_reading_a_kept_reference_to_an_unsharded_parameter() -> None:
    """Check the behaviour that docs/how-to/schedule.md states."""
    run_ranks(read_a_kept_reference, 2, "it is there")
    for environment in (COPIES, SOCKETS):
        run_ranks(read_a_kept_reference, 2, "torch raises", environment=environment)
    with pytest.raises(RanksError, match="SIGSEGV"):
        run_ranks(read_a_kept_reference, 2, "the process ends", environment=SOCKETS)
