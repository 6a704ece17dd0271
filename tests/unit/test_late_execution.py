"""Late execution on the simulated accelerator: what is not ordered computes other bits in some order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.simulation import ALONE, simulated_accelerator

cpu: Any = torch.cpu
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


def add_on(stream: Any, x: torch.Tensor) -> torch.Tensor:
    with cpu.stream(stream):
        return x + 1


def test_a_read_that_does_not_wait_reads_other_bits() -> None:
    def read(x: torch.Tensor, side: Any, *, waits: bool) -> object:
        y = add_on(side, x)
        if waits:
            cpu.current_stream().wait_stream(side)
        return y, y * 2

    (found, *_) = differences(lambda x, side: read(x, side, waits=False))
    assert found.startswith("mul at test_late_execution.py:")
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
