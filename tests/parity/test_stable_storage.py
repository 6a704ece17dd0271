"""``set_stable_storage``: addresses stay, and a step allocates nothing and does not wait on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn

from composable_fsdp import MixedPrecisionPolicy, fully_shard
from composable_fsdp.errors import LifecycleError
from composable_fsdp.testing import SimulatedAccelerator, simulated_accelerator
from tests._internals import ProcessGroupCommunicator, state_of
from tests.helpers.stream_training import BF16, WIDTH, Block, alone

PRECISIONS = {"fp32": MixedPrecisionPolicy(), "bf16": MixedPrecisionPolicy(**BF16)}
STEPS = 10


class Training:
    """Steps of a model of one of 8 ranks, with the addresses that a step used."""

    def __init__(self, mesh: Any, precision: MixedPrecisionPolicy) -> None:
        torch.manual_seed(0)
        self.model = cast(Any, nn.Sequential(*(Block() for _ in range(3)), nn.Linear(WIDTH, 7)))  # 7 rows: not even
        for block in self.model:
            fully_shard(block, mesh=mesh, mp_policy=precision)
        fully_shard(self.model, mesh=mesh, mp_policy=precision)
        self.model.set_costs(None)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, foreach=True)
        self.addresses: list[int] = []
        for module in self.model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(lambda m, _: self.addresses.append(m.weight.data_ptr()))
        self._others: list[torch.Tensor] = []

    def step(self) -> tuple[int, ...]:
        """Train a step, and return the addresses of unsharded parameters, messages and gradients in it."""
        self.addresses.clear()
        self._optimizer.zero_grad()
        with mock.patch.object(ProcessGroupCommunicator, "_launch", self._launching(ProcessGroupCommunicator._launch)):
            self.model(torch.ones(4, WIDTH)).sum().backward()
        self.addresses += [parameter.grad.to_local().data_ptr() for parameter in self.model.parameters()]
        self._optimizer.step()
        return tuple(self.addresses)

    def _launching(self, launch: Any) -> Any:
        """Return ``launch``, which notes the addresses of messages."""

        def noting(communicator: ProcessGroupCommunicator, label: str, calls: Any) -> Any:
            self.addresses += [tensor.data_ptr() for _, tensors, _ in calls for tensor in tensors]
            return launch(communicator, label, calls)

        return noting

    def take_freed_memory(self) -> None:
        """Allocate what the allocator of the host might give to the next step again."""
        self._others += [torch.empty(nbytes // 4) for nbytes in (1 << 9, 1 << 12, 1 << 14, 1 << 16, 1 << 18)] * 4


@contextmanager
def training(precision: str, *, hybrid: bool = False) -> Iterator[tuple[Training, SimulatedAccelerator]]:
    with alone() as mesh, simulated_accelerator() as device:
        yield Training(mesh if hybrid else mesh["shard"], PRECISIONS[precision]), device
    assert [str(race) for race in device.races] == []


@pytest.mark.behaviour("M-04")
@pytest.mark.parametrize("hybrid", [False, True], ids=["sharded", "hybrid"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_addresses_stay_and_nothing_is_allocated_or_waited_for(precision: str, hybrid: bool) -> None:
    with training(precision, hybrid=hybrid) as (run, device):
        run.step()  # records the order of modules
        run.model.set_stable_storage()
        run.step()
        seen = set()
        with device.capture() as capture:
            for _ in range(STEPS):
                run.take_freed_memory()
                seen.add(run.step())
    assert len(seen) == 1
    assert len(next(iter(seen))) > 24  # 7 weights, 14 gradients, and messages
    assert capture.synchronizations == []
    casts_of_inputs = [each for each in capture.allocations if "hooks.py" in each.partition(" < ")[0]]
    assert capture.allocations == casts_of_inputs  # activations


def test_without_it_they_move_and_messages_are_allocated() -> None:
    with training("bf16") as (run, device), device.capture() as capture:
        seen = set()
        for _ in range(STEPS):
            run.take_freed_memory()
            seen.add(run.step())
    assert len(seen) > 1
    assert {"param_group_gradients.py", "all_gather.py"} <= {
        word.partition(":")[0] for each in capture.allocations for word in each.split()
    }


def test_the_host_waiting_for_a_stream_is_noted() -> None:
    with simulated_accelerator() as device, device.capture() as capture:
        torch.ones(3).sum().item()
        torch.cpu.Stream().synchronize()  # type: ignore[attr-defined]
        torch.cpu.synchronize()
    assert [text.partition(" at ")[0] for text in capture.synchronizations] == [
        *("_local_scalar_dense", "Stream.synchronize", "synchronize")
    ]
    with simulated_accelerator() as device:
        torch.ones(3).sum().item()
        with device.capture() as capture:
            pass
    assert capture.synchronizations == []


def test_results_are_those_without_it_and_memory_is_freed_after_it() -> None:
    def outputs(*, is_stable: bool) -> torch.Tensor:
        with training("bf16") as (run, _):
            run.model.set_stable_storage(is_stable)
            for _ in range(3):
                run.step()
            groups = [state_of(module).group for module in (run.model, *run.model)]
            assert all(bucket.unsharded_bytes > 0 for group in groups for bucket in group.buckets) is is_stable
            run.model.set_stable_storage(False)
            assert not any(bucket.unsharded_bytes for group in groups for bucket in group.buckets)
            result: torch.Tensor = run.model(torch.ones(4, WIDTH))
            with pytest.raises(LifecycleError, match="set_stable_storage would move parameters of"):
                run.model.set_stable_storage()
            return result

    assert torch.equal(outputs(is_stable=True), outputs(is_stable=False))


def test_memory_that_the_user_still_has_is_not_used_again() -> None:
    with training("fp32") as (run, _):
        run.model.set_stable_storage()
        run.step()
        run.step()
        kept = [parameter.grad.to_local() for parameter in run.model.parameters()]
        before = [gradient.clone() for gradient in kept]
        run.step()
        run.step()
        assert all(map(torch.equal, kept, before))
