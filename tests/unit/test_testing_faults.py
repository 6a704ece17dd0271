"""Injected faults on simulated ranks have the right effect in the right operation, exactly once."""

from __future__ import annotations

import copy
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp.errors import ConfigurationError
from composable_fsdp.testing import Delay, Drop, Effect, Fault, FaultyCommunicator, Kill, Raise, inject_faults
from tests._internals import Collective, Transfer
from tests.helpers.cut_off_store import PartitionableStore
from tests.helpers.fake_world import FakeWorld
from tests.helpers.transports import in_place


def alone(*faults: Fault) -> FaultyCommunicator:
    return FaultyCommunicator(FakeWorld(1).communicator(0), faults)


def gathered(communicator: FaultyCommunicator, label: str = "all-gather") -> list[float]:
    output = torch.zeros(2)
    communicator.launch(Collective.ALL_GATHER, [Transfer(output, torch.tensor([1.0, 2.0]))], label).wait()
    return output.tolist()


def test_a_faulty_communicator_without_faults_behaves_like_its_base() -> None:
    communicator = alone()
    assert gathered(communicator, "a") == [1.0, 2.0]
    tensor = torch.tensor([3.0])
    communicator.launch(Collective.ALL_REDUCE, in_place([tensor]), "b").wait()
    assert tensor.item() == 3.0
    assert communicator.labels == ["a", "b"]
    for name in ("rank", "size", "traits"):
        assert getattr(communicator, name) == getattr(communicator.base, name)


def test_a_decorator_of_a_communicator_can_be_copied() -> None:
    communicator = alone()
    copied = copy.copy(communicator)
    assert copied == communicator
    assert gathered(copied, "a") == [1.0, 2.0]


def test_a_fault_comes_once_and_only_to_the_operation_that_it_names() -> None:
    communicator = alone(Fault(Drop(), label="layers.1", number=1))
    labels = ["layers.0", "layers.1", "layers.0", "layers.1", "layers.1"]
    assert [gathered(communicator, label)[0] for label in labels] == [1.0, 1.0, 1.0, 0.0, 1.0]


def test_a_fault_of_another_rank_does_not_come() -> None:
    assert gathered(alone(Fault(Drop(), rank=1))) == [1.0, 2.0]
    assert gathered(alone(Fault(Drop(), rank=0))) == [0.0, 0.0]


def test_a_dropped_collective_changes_nothing() -> None:
    assert gathered(alone(Fault(Drop()))) == [0.0, 0.0]


def test_a_delayed_collective_is_correct() -> None:
    begin = time.monotonic()
    assert gathered(alone(Fault(Delay(0.05)))) == [1.0, 2.0]
    assert time.monotonic() - begin >= 0.05


def test_a_fault_raises_its_exception() -> None:
    with pytest.raises(MemoryError, match="none left"):
        gathered(alone(Fault(Raise(MemoryError("none left")))))


def test_a_signal_goes_to_this_process() -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: got.append(number))
    try:
        assert gathered(alone(Fault(Kill(signal.SIGUSR2)))) == [1.0, 2.0]
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert got == [signal.SIGUSR2]


def test_effects_may_be_callables_of_the_user() -> None:
    seen: list[int] = []

    def effect(launch: Any, outputs: Any) -> Any:
        seen.append(len(outputs))
        return launch()

    checked: Effect = effect
    assert gathered(alone(Fault(checked))) == [1.0, 2.0]
    assert seen == [1]


def test_only_sharded_models_have_operations() -> None:
    with pytest.raises(ConfigurationError, match=r"^inject_faults: Linear is not sharded\. Call fully_shard"):
        inject_faults(nn.Linear(2, 2)).__enter__()


def test_a_disconnected_store_times_out_until_it_is_reconnected(tmp_path: Path) -> None:
    store = PartitionableStore(dist.FileStore(str(tmp_path / "store"), 1), seconds=0.05)
    store.set("a", "1")
    clone = store.clone()
    with store.cut_off():
        for each in (store, clone, dist.PrefixStore("p", store)):
            with pytest.raises(RuntimeError, match=r"the store did not answer in 0\.05 s"):
                each.get("a")
    assert clone.get("a") == b"1"
    assert store.add("n", 2) == 2
    store.wait(["a"], timedelta(seconds=1))
