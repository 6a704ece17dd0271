"""Programs that break one rule of the stand-in for NCCL each, or none: ``tests/unit/test_nccl.py`` runs both forms.
Where the library keeps the rule by a call or a reference of its own, the fault is that this is left out, as in
``tests.planted_faults``; elsewhere it is a program of the user."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from composable_fsdp import fully_shard
from tests.helpers.stream_training import TRAININGS, alone
from tests.planted_faults import left_out
from tests.simulation import SimulatedAccelerator, SimulatedEvent
from tests.simulation.nccl import Contract

Program = Callable[[SimulatedAccelerator, Contract, bool], object]
"""Gets the accelerator, the stand-in, and whether it breaks the rule."""

cpu: Any = torch.cpu
gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def train_without(
    training: str, function: str, text: str, device: SimulatedAccelerator, contract: Contract, broken: bool
) -> None:
    """Run a training of ``stream_training``; if broken, without a site of the library."""
    with left_out(function, text) if broken else nullcontext():
        TRAININGS[training]()


@contextmanager
def group_of(contract: Contract) -> Iterator[dist.ProcessGroup]:
    """Make a group of four ranks, of which only this process exists."""
    with alone() as mesh:
        yield mesh.get_group("shard")


def gather_on_a_side_stream(*, is_async: bool, waits: str) -> Program:
    """Return a program that gathers on a stream, and orders what reads the result by ``waits``, unless it is broken."""

    def run(device: SimulatedAccelerator, contract: Contract, broken: bool) -> None:
        with group_of(contract) as group:
            shard, full, side = torch.ones(4), torch.empty(16), cpu.Stream()
            side.wait_stream(cpu.current_stream())
            with cpu.stream(side):
                work = gather(full, shard, group=group, async_op=is_async)
                if work is not None and waits == "nothing" and not broken:
                    work.wait()
            if (waits == "stream" and not broken) or waits == "nothing":
                cpu.current_stream().wait_stream(side)
            full.sum()

    return run


def gather_what_another_stream_writes(device: SimulatedAccelerator, contract: Contract, broken: bool) -> None:
    """Gather from the current stream what a side stream has written."""
    with group_of(contract) as group:
        shard, full, side = torch.empty(4), torch.empty(16), cpu.Stream()
        side.wait_stream(cpu.current_stream())
        with cpu.stream(side):
            shard.fill_(1)
        if not broken:
            cpu.current_stream().wait_stream(side)
        gather(full, shard, group=group, async_op=True).wait()


def drop_the_input(device: SimulatedAccelerator, contract: Contract, broken: bool) -> None:
    """Gather on a side stream memory of the current one, which is dropped before or after the current one waits."""
    with group_of(contract) as group:
        shard, full, side = torch.ones(4), torch.empty(16), cpu.Stream()
        side.wait_stream(cpu.current_stream())
        with cpu.stream(side):
            gather(full, shard, group=group)
        if broken:
            del shard
        other = torch.ones(4)
        cpu.current_stream().wait_stream(side)
        other.sum(), full.sum()


def gather_of(dtype: torch.dtype, device: SimulatedAccelerator, contract: Contract, broken: bool) -> None:
    """Gather a dtype as it is, or as bytes."""
    with group_of(contract) as group:
        shard, full = torch.zeros(4, dtype=torch.uint8).view(dtype), torch.zeros(16, dtype=torch.uint8).view(dtype)
        if not broken:
            shard, full = shard.view(torch.uint8), full.view(torch.uint8)
        gather(full, shard, group=group)


def reduce_by(op: Any, device: SimulatedAccelerator, contract: Contract, broken: bool) -> None:
    """Reduce integers by ``op``, or by their sum."""
    with group_of(contract) as group:
        dist.all_reduce(torch.ones(4, dtype=torch.int32), op if broken else dist.ReduceOp.SUM, group=group)


def coalesce_two_dtypes(device: SimulatedAccelerator, contract: Contract, broken: bool) -> None:
    """Reduce a float and an integer in one launch, or in two."""
    tensors = [torch.ones(4), torch.ones(4, dtype=torch.int32)]
    with group_of(contract) as group:
        for together in [tensors] if broken else [[tensor] for tensor in tensors]:
            with dist._coalescing_manager(group=group, async_ops=True) as works:
                for tensor in together:
                    dist.all_reduce(tensor, group=group)
            works.wait()


def raise_while_coalescing(device: SimulatedAccelerator, contract: Contract, broken: bool) -> None:
    """Raise between two coalesced launches, or before the first."""
    with alone() as mesh, suppress(ArithmeticError):
        group = mesh.get_group("shard")
        if not broken:
            raise ArithmeticError("test failure")
        with dist._coalescing_manager(group=group, async_ops=True):
            gather(torch.empty(16), torch.ones(4), group=group)
            raise ArithmeticError("test failure")


def in_thread(action: Callable[[], object]) -> None:
    """Run ``action`` in another thread, and lose its exception."""

    def run() -> None:
        with suppress(AssertionError):
            action()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def query_in_a_thread(device: SimulatedAccelerator, contract: Contract, broken: bool) -> None:
    """Query an event in a thread that has set its device, or not."""
    event: SimulatedEvent = cpu.current_stream().record_event()

    def query() -> None:
        if not broken:
            cpu.set_device(0)
        event.query()

    in_thread(query)


def ask_a_work_in_a_thread(device: SimulatedAccelerator, contract: Contract, broken: bool) -> None:
    """Ask a work in a thread that has set its device, or not."""
    with group_of(contract) as group:
        work = gather(torch.empty(16), torch.ones(4), group=group, async_op=True)

        def ask() -> None:
            if not broken:
                cpu.set_device(0)
            work.is_completed()

        in_thread(ask)
        work.wait()


def destroy_in_a_thread(device: SimulatedAccelerator, contract: Contract, broken: bool) -> None:
    """Drop the last reference to a work in another thread, or in this one."""
    with group_of(contract) as group:
        works = [gather(torch.empty(16), torch.ones(4), group=group, async_op=True)]
        works[0].wait()
        if broken:
            in_thread(works.clear)


def capture_a_step(before: Callable[[Any], object], inside: Callable[[Any], object]) -> Program:
    """Return a program that captures a step of the library, and if it is broken, calls ``inside`` in the capture.
    ``before``: called with the model before the capture. ``inside`` gets what it returns."""

    def run(device: SimulatedAccelerator, contract: Contract, broken: bool) -> None:
        with alone() as mesh:
            model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh=mesh["shard"])
            x = torch.ones(2, 8)
            model(x).sum().backward()
            known = before(model)
            cpu.synchronize()
            with device.capture():
                if broken:
                    inside(known)
                model(x).sum().backward()

    return run


def wait_after_the_capture(device: SimulatedAccelerator, contract: Contract, broken: bool) -> None:
    """Wait for an event that was recorded in a capture, after it or in it."""
    with device.capture():
        event = cpu.current_stream().record_event()
        if not broken:
            cpu.current_stream().wait_event(event)
    if broken:
        cpu.current_stream().wait_event(event)


def fork_without_joining(_: object) -> None:
    side = cpu.Stream()
    side.wait_stream(cpu.current_stream())
    with cpu.stream(side):
        torch.ones(4).add_(1)


def work_on_another_stream(_: object) -> None:
    with cpu.stream(cpu.Stream()):
        torch.ones(4).add_(1)


def capture_the_first_operation(device: SimulatedAccelerator, contract: Contract, broken: bool) -> None:
    with group_of(contract) as group:
        shard, full = torch.ones(4), torch.empty(16)
        if not broken:
            gather(full, shard, group=group)
        with device.capture():
            gather(full, shard, group=group)


def launch_after_the_end(device: SimulatedAccelerator, contract: Contract, broken: bool) -> None:
    """Gather over a group that is destroyed, or not."""
    with alone() as mesh:
        group = mesh.get_group("shard")
        if broken:
            group.shutdown()
        gather(torch.empty(16), torch.ones(4), group=group)


def ask_after_the_end(ask: str, device: SimulatedAccelerator, contract: Contract, broken: bool) -> None:
    """Ask a work, after or before its group is destroyed."""
    with alone() as mesh:
        work = gather(torch.empty(16), torch.ones(4), group=mesh.get_group("shard"), async_op=True)
        if not broken:
            getattr(work, ask)()
    if broken:
        getattr(work, ask)()


def make_a_group(device: SimulatedAccelerator, contract: Contract, broken: bool) -> None:
    with alone():
        dist.new_group([0, 1], use_local_synchronization=broken)


def make_a_group_of_others(device: SimulatedAccelerator, contract: Contract, broken: bool) -> None:
    """Make a group in which this rank is, or is not."""
    contract.bound = True
    with alone():
        dist.new_group([1, 2] if broken else [0, 1])


NOTHING: Callable[[object], None] = lambda _: None  # noqa: E731
ALONE: dict[str, list[Program]] = {
    "current stream": [
        gather_on_a_side_stream(is_async=False, waits="stream"),
        partial(train_without, "unfused, sharded", "CommStream.run", "self._stream.wait_stream(self._copy_stream)"),
        partial(train_without, "unfused, sharded", "InFlight.wait", "current.wait_event(self._event)"),
    ],
    "own stream": [gather_what_another_stream_writes],
    "wait": [gather_on_a_side_stream(is_async=True, waits="nothing")],
    "held": [
        drop_the_input,
        partial(train_without, "unfused, sharded", "InFlight.enqueue", "self._event, self._current_stream = "),
    ],
    "dtype": [
        partial(gather_of, getattr(torch, name))
        for name in ("int16", "uint16", "uint32", "float8_e8m0fnu")
        if hasattr(torch, name)
    ],
    "reduce op": [partial(reduce_by, op) for op in (dist.ReduceOp.AVG, dist.ReduceOp.BAND)],
    "coalescing": [coalesce_two_dtypes],
    "open group": [raise_while_coalescing],
    "device of the thread": [query_in_a_thread, ask_a_work_in_a_thread],
    "device of a destructor": [destroy_in_a_thread],
    "capture: host": [
        capture_a_step(lambda _: cpu.current_stream().record_event(), lambda event: event.query()),
        capture_a_step(NOTHING, lambda _: torch.ones(4).sum().item()),
        capture_a_step(NOTHING, lambda _: cpu.synchronize()),
    ],
    "capture: isolation": [
        capture_a_step(
            lambda _: cpu.current_stream().record_event(), lambda event: cpu.current_stream().wait_event(event)
        ),
        wait_after_the_capture,
    ],
    "capture: fork": [capture_a_step(NOTHING, work_on_another_stream)],
    "capture: join": [capture_a_step(NOTHING, fork_without_joining)],
    "capture: connection": [capture_the_first_operation],
    "destroyed group": [launch_after_the_end],
    "work of a destroyed group": [partial(ask_after_the_end, ask) for ask in ("wait", "is_completed")],
    "new group of others": [make_a_group_of_others],
    "local synchronization": [make_a_group],
}
"""Programs without other processes, by the rule that they break."""
NEEDS = {
    "work of a destroyed group": ("nccl2", "torchcomms"),
    "new group of others": ("nccl2",),
    "local synchronization": ("torchcomms",),
}
"""The variants that have a rule. The others have all."""


def gather_on(group: Any, size: int) -> None:
    gather(torch.empty(size * 4), torch.ones(4), group=group)


def swap_two_operations(device: SimulatedAccelerator, contract: Contract, broken: bool) -> None:
    """Have rank 1 launch a gather and a reduction in another order."""
    group = dist.new_group(backend=contract.backend)
    tensor, swaps = torch.ones(4), broken and dist.get_rank() == 1
    steps: list[Callable[[], object]] = [partial(gather_on, group, 2), partial(dist.all_reduce, tensor, group=group)]
    for step in reversed(steps) if swaps else steps:
        step()


def leave_a_rank_out(device: SimulatedAccelerator, contract: Contract, broken: bool, *, connects: bool) -> None:
    """Have rank 1 leave out an operation."""
    group = dist.new_group(backend=contract.backend, timeout=timedelta(seconds=1 if broken else 60))
    if connects:
        gather_on(group, 2)
    if dist.get_rank() == 0 or not broken:
        gather_on(group, 2)


def make_a_group_of_some(device: SimulatedAccelerator, contract: Contract, broken: bool) -> None:
    """Make a group of rank 0, in which rank 1 takes part or not."""
    contract.bound = True
    if not broken:
        dist.new_group([dist.get_rank()], backend="gloo")
    elif dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=contract.variant != "torchcomms", backend="gloo")


ON_RANKS: dict[str, list[Program]] = {
    "order": [swap_two_operations],
    "timeout": [partial(leave_a_rank_out, connects=True)],
    "connection": [partial(leave_a_rank_out, connects=False)],
    "new group": [make_a_group_of_some],
}
"""Programs on two ranks, by the rule that they break."""
