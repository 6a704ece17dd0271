"""The simulated accelerator: the races that it finds between accesses of plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any

import pytest
import torch

from tests._internals import outside_callers_context
from tests.simulation import simulated_accelerator

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
