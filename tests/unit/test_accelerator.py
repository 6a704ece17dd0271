"""The simulated accelerator: the races that it finds, and other bits in other orders."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests._internals import outside_callers_context
from tests.simulation import ALONE, simulated_accelerator

cpu: Any = torch.cpu


def race_of(body: Callable[[Any, Any], object]) -> list[str]:
    """Return the kinds of the races in ``body``, which gets a tensor that the default stream wrote, and a stream."""
    with simulated_accelerator() as device:
        x = torch.zeros(8)
        kept = body(x, cpu.Stream())
    del kept
    return [race.kind for race in device.races]


def add_on(stream: Any, x: torch.Tensor) -> torch.Tensor:
    with cpu.stream(stream):
        return x + 1


def test_a_read_that_does_not_wait_for_the_write_is_found() -> None:
    assert race_of(lambda x, side: add_on(side, x)) == ["read"]


def test_operations_of_the_library_outside_of_the_callers_context_are_accesses_too() -> None:
    assert race_of(lambda x, side: outside_callers_context()(add_on)(side, x)) == ["read"]


def test_streams_events_and_the_host_order_accesses() -> None:
    def by_stream(x: torch.Tensor, side: Any) -> object:
        side.wait_stream(cpu.current_stream())
        return add_on(side, x)

    def by_event(x: torch.Tensor, side: Any) -> object:
        side.wait_event(cpu.current_stream().record_event())
        y = add_on(side, x)
        event: Any = cpu.Event()
        event.record(side)
        event.wait()
        return y.add_(x)

    def by_host(x: torch.Tensor, side: Any) -> object:
        cpu.current_stream().synchronize()
        y = add_on(side, x)
        cpu.synchronize()
        return y.add_(x)

    assert race_of(by_stream) == race_of(by_event) == race_of(by_host) == []


def free_while_in_use(x: torch.Tensor, side: Any, after: Callable[[torch.Tensor, Any], object]) -> object:
    y = x + 1
    side.wait_stream(cpu.current_stream())
    z = add_on(side, y)
    after(y, side)
    del y
    return torch.empty(8), z


def test_memory_that_is_freed_while_another_stream_uses_it_is_found() -> None:
    assert race_of(lambda x, side: free_while_in_use(x, side, lambda *_: None)) == ["reuse"]


def test_a_storage_that_is_resized_to_nothing_is_freed() -> None:
    def resize(x: torch.Tensor, side: Any) -> object:
        y = x + 1
        side.wait_stream(cpu.current_stream())
        z = add_on(side, y)
        y.untyped_storage().resize_(0)
        return torch.empty(8), y, z

    assert race_of(resize) == ["reuse"]


def pinned() -> torch.Tensor:
    return torch.zeros(8, pin_memory=True)


@pytest.mark.parametrize(
    "read",
    [*map(methodcaller, ("sum", "tolist", "numpy", "clone")), lambda host: host[0].item()],
    ids=["sum", "tolist", "numpy", "clone", "item"],
)
def test_host_memory_that_is_read_before_the_copy_to_it_is_done_is_found(read: Callable[[Any], object]) -> None:
    def copy_and_read(x: torch.Tensor, wait: Callable[[], object]) -> object:
        host = pinned().copy_(x, non_blocking=True)
        wait()
        return host, read(host)

    assert race_of(lambda x, _: copy_and_read(x, lambda: None)) == ["read"]
    assert race_of(lambda x, _: copy_and_read(x, lambda: cpu.Stream().wait_stream(cpu.current_stream()))) == ["read"]
    assert race_of(lambda x, _: copy_and_read(x, lambda: cpu.current_stream().record_event().synchronize())) == []
    assert race_of(lambda x, _: copy_and_read(x, cpu.synchronize)) == []


@pytest.mark.parametrize(
    "read",
    [*map(methodcaller, ("cpu", "tolist", "numpy", "nonzero")), lambda y: bool(y.any()), lambda y: y[y > 0]],
    ids=["cpu", "tolist", "numpy", "nonzero", "bool", "mask"],
)
def test_the_host_reads_device_memory_after_the_current_stream_only(read: Callable[[Any], object]) -> None:
    def write_and_read(x: torch.Tensor, side: Any, *, waits: bool) -> object:
        side.wait_stream(cpu.current_stream())
        y = add_on(side, x)
        if waits:
            cpu.current_stream().wait_stream(side)
        found = read(y)
        with cpu.stream(cpu.Stream()):
            return x.add_(1), y.add_(1), found  # the host has waited for all accesses to x and y

    assert set(race_of(lambda x, side: write_and_read(x, side, waits=False))) >= {"read"}
    assert race_of(lambda x, side: write_and_read(x, side, waits=True)) == []


def test_a_race_names_both_places_and_the_memory() -> None:
    with simulated_accelerator() as device:
        x = torch.zeros(8)
        add_on(cpu.Stream(), x)
    (race,) = device.races
    assert race.memory.startswith("32 bytes allocated by zeros at ")
    assert race.first.startswith("write on stream 0 (default) by zeros at test_accelerator.py:")
    assert race.second.startswith("read on stream 1 by add at test_accelerator.py:")
    assert "test_a_race_names" in race.first
    assert str(race).splitlines()[0] == f"unordered read of {race.memory}"


ORDERS = 5


def differences(body: Callable[[torch.Tensor, Any], object]) -> list[str]:
    """Return what differs in other orders of ``body``, which gets a tensor of ones, and a stream that waits for it."""
    with simulated_accelerator(records=True) as device:
        x, side = torch.ones(8), cpu.Stream()
        side.wait_stream(cpu.current_stream())
        kept = body(x, side)
    found = [each for seed in range(ORDERS) for each in device.run_late(seed)]
    del kept
    return found


def test_a_read_that_does_not_wait_reads_other_bits() -> None:
    def read(x: torch.Tensor, side: Any, *, waits: bool) -> object:
        y = add_on(side, x)
        if waits:
            cpu.current_stream().wait_stream(side)
        return y, y * 2

    (found, *_) = differences(lambda x, side: read(x, side, waits=False))
    assert found.startswith("mul at test_accelerator.py:")
    assert found.endswith("on stream 0 (default) writes other bits")
    assert differences(lambda x, side: read(x, side, waits=True)) == []


def test_a_write_that_does_not_wait_changes_what_another_stream_reads() -> None:
    def write(x: torch.Tensor, side: Any, *, event: bool) -> object:
        y = add_on(side, x)
        if event:
            cpu.current_stream().wait_event(side.record_event())
        return y, x.add_(1)

    assert any("add at" in found for found in differences(lambda x, side: write(x, side, event=False)))
    assert differences(lambda x, side: write(x, side, event=True)) == []


@pytest.mark.parametrize("writes", [False, True], ids=["read", "written"])
def test_memory_that_is_used_after_it_was_freed_is_found(writes: bool) -> None:
    def free(x: torch.Tensor, side: Any, *, waits: bool) -> object:
        y = x + 1
        side.wait_stream(cpu.current_stream())
        with cpu.stream(side):
            z = y.fill_(3).new_ones(8) if writes else y * 2
        if waits:
            cpu.current_stream().wait_stream(side)
        del y
        return torch.empty(8), z

    expected = "is written after it was freed" if writes else "mul at"
    assert any(expected in each for each in differences(lambda x, side: free(x, side, waits=False)))
    assert differences(lambda x, side: free(x, side, waits=True)) == []


def test_a_host_read_before_the_copy_to_it_is_done_reads_other_bits() -> None:
    def copy(x: torch.Tensor, *, waits: bool) -> object:
        host = torch.zeros(8, pin_memory=True).copy_(x, non_blocking=True)
        if waits:
            cpu.current_stream().synchronize()
        return host, host.tolist(), host.sum()

    assert any(
        "tolist" in each and "reads other bits" in each for each in differences(lambda x, _: copy(x, waits=False))
    )
    assert differences(lambda x, _: copy(x, waits=True)) == []


@pytest.mark.parametrize("waits", [False, True])
def test_what_a_collective_sends_is_compared(waits: bool) -> None:
    dist.init_process_group(ALONE, store=FakeStore(), rank=0, world_size=2)
    try:
        with simulated_accelerator(records=True) as device:
            side, x = cpu.Stream(), torch.zeros(4)
            side.wait_stream(cpu.current_stream())
            with cpu.stream(side):
                x.fill_(1)
            if waits:
                cpu.current_stream().wait_stream(side)
            work = dist.all_reduce(x, async_op=True)
            assert work is not None
            work.wait()
            assert x.sum() == 8
        found = [each for seed in range(ORDERS) for each in device.run_late(seed)]
    finally:
        dist.destroy_process_group()
    assert any("all_reduce" in each and "reads other bits" in each for each in found) is not waits
    assert not (waits and found)
