"""Communication streams: null streams on CPU, streams of a simulated device, and functions without gradients."""

from __future__ import annotations

import gc
import weakref
from types import ModuleType
from typing import Any

import pytest
import torch

from tests._internals import CommStream, CommStreams, DeviceCapabilities
from tests.simulation import simulated_accelerator


class Buffer:
    """An object that supports weak references."""


class LoggedWork:
    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def wait(self) -> None:
        self._log.append(f"work of {self._name} done")


class SimulatedDevice(ModuleType):
    """A device module whose streams and events record their calls."""

    def __init__(self) -> None:
        super().__init__("simulated")
        self.log: list[str] = []
        self._names = iter(("compute", "first", "second", "third"))
        self.current = self.Stream()

    def Stream(self, priority: int = 0) -> SimulatedStream:
        return SimulatedStream(self, next(self._names))

    def current_stream(self) -> SimulatedStream:
        return self.current

    def stream(self, stream: SimulatedStream) -> SimulatedStream:
        return stream


class SimulatedStream:
    def __init__(self, device: SimulatedDevice, name: str) -> None:
        self._device, self.name = device, name

    def __enter__(self) -> None:
        self._before, self._device.current = self._device.current, self

    def __exit__(self, *_: object) -> None:
        self._device.current = self._before

    def record_event(self) -> SimulatedEvent:
        return SimulatedEvent(self._device, self.name)

    def wait_stream(self, other: SimulatedStream) -> None:
        self._device.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: SimulatedEvent) -> None:
        self._device.log.append(f"{self.name} waits for event of {event.name}")


class SimulatedEvent:
    def __init__(self, device: SimulatedDevice, name: str) -> None:
        self._device, self.name = device, name

    def synchronize(self) -> None:
        self._device.log.append(f"host waits for event of {self.name}")


def stream_of(module: Any, name: str) -> CommStream:
    has_streams = module is not torch.cpu
    return CommStream(name, DeviceCapabilities(module, has_streams=has_streams), priority=-1)


def launch(log: list[str], name: str) -> LoggedWork:
    log.append(f"launch {name}")
    return LoggedWork(log, name)


def test_null_streams_launch_work_at_once_and_finish_it_in_wait() -> None:
    log: list[str] = []
    stream = stream_of(torch.cpu, "gather")

    def finish() -> int:
        log.append("finish a")
        return 7

    pending = stream.run(lambda: launch(log, "a"), finish)
    assert log == ["launch a"]
    assert pending.wait() == 7
    assert pending.wait() == 7, "a second wait must return the same result"
    assert log == ["launch a", "work of a done", "finish a"]


def test_null_streams_launch_dependent_work_when_its_predecessor_is_done() -> None:
    log: list[str] = []
    streams = CommStreams(torch.device("cpu"))
    scatter = streams.reduce.run(lambda: launch(log, "scatter"), lambda: log.append("finish scatter"))
    reduce = streams.replicate.run(lambda: launch(log, "reduce"), lambda: log.append("finish reduce"), after=scatter)
    assert log == ["launch scatter"]
    reduce.start()
    assert log == ["launch scatter", "work of scatter done", "finish scatter", "launch reduce"]
    reduce.start()
    reduce.wait()
    assert log[4:] == ["work of reduce done", "finish reduce"]


def test_real_streams_make_the_current_stream_wait_and_never_the_host() -> None:
    device = SimulatedDevice()
    log = device.log
    first, second = stream_of(device, "first"), stream_of(device, "second")

    def launched(name: str) -> Any:
        log.append(f"launch {name} on {device.current.name}")
        return LoggedWork(log, name)

    scatter = first.run(lambda: launched("a"), lambda: log.append(f"finish a on {device.current.name}"))
    reduce = second.run(lambda: launched("b"), lambda: log.append(f"finish b on {device.current.name}"), after=scatter)
    assert log == [
        "first waits for compute",
        "launch a on first",
        "work of a done",
        "finish a on first",
        "second waits for compute",
        "second waits for event of first",
        "launch b on second",
        "work of b done",
        "finish b on second",
    ]
    reduce.wait()
    assert log[9:] == ["compute waits for event of second"]
    scatter.synchronize()
    assert log[10:] == ["compute waits for event of first", "host waits for event of first"]


def test_work_that_is_finished_in_the_wait_runs_on_the_stream_that_waits() -> None:
    device = SimulatedDevice()
    log = device.log
    stream = stream_of(device, "first")

    def finish() -> None:
        log.append(f"finish on {device.current.name}")

    pending = stream.run(lambda: launch(log, "a"), finish, finish_in_wait=True)
    assert log == ["first waits for compute", "launch a"]
    pending.wait()
    ordered = "compute waits for event of first"  # a collective of one rank is nothing but copies
    done = [ordered, "work of a done", "finish on compute", "first waits for event of compute"]
    assert log[2:] == done, "the memory of messages is used again on their stream"
    with device.Stream():  # as for the second one of fused groups
        pending.wait()
    assert log[6:] == ["second waits for event of compute"]


def test_runs_take_memory_of_the_current_stream() -> None:
    device = SimulatedDevice()
    stream, log = stream_of(device, "first"), device.log

    def allocate() -> None:
        log.append(f"allocate on {device.current.name}")

    stream.run(lambda: launch(log, "a"), lambda: None, allocate=allocate)
    assert log[:3] == ["allocate on compute", "first waits for compute", "launch a"]


@pytest.mark.parametrize("finish_in_wait", [False, True])
def test_memory_is_not_used_again_before_another_stream_that_has_waited_for_it_is_done(finish_in_wait: bool) -> None:
    with simulated_accelerator() as device:
        stream, side, rows = CommStreams(torch.device("cpu")).gather, torch.cpu.Stream(), list[torch.Tensor]()

        def start() -> LoggedWork:
            rows[0].zero_()
            return LoggedWork([], "a")

        def finish() -> None:
            rows.pop().sum()

        pending = stream.run(start, finish, allocate=lambda: rows.append(torch.empty(4)), finish_in_wait=finish_in_wait)
        with torch.cpu.stream(side):
            pending.wait()
        torch.empty(4)
    assert device.races == []


@pytest.mark.parametrize("in_copies", [False, True])
def test_memory_of_a_failed_launch_is_not_used_again_before_its_copies_are_done(in_copies: bool) -> None:
    with simulated_accelerator() as device:
        stream, rows = CommStreams(torch.device("cpu")).gather, list[torch.Tensor]()

        def fail() -> Any:
            rows.pop().zero_()
            raise ArithmeticError("a codec failed")

        start, prepare = (lambda: LoggedWork([], "a"), fail) if in_copies else (fail, None)
        with pytest.raises(ArithmeticError, match="a codec failed"):
            stream.run(start, lambda: None, allocate=lambda: rows.append(torch.empty(4)), prepare=prepare)
        torch.empty(4)
    assert device.races == []


def test_copies_of_the_next_collective_wait_for_none_in_flight() -> None:
    device = SimulatedDevice()
    stream = CommStream("gather", DeviceCapabilities(device, has_streams=True), 0, copies_ahead=True)
    log = device.log

    def start(name: str) -> Any:
        def prepare() -> None:
            log.append(f"copy {name} on {device.current.name}")

        def launched() -> LoggedWork:
            log.append(f"launch {name} on {device.current.name}")
            return LoggedWork([], name)

        return stream.run(launched, lambda: None, prepare=prepare, finish_in_wait=True)

    works = [start(name) for name in "ab"]
    assert log == [
        *("second waits for compute", "copy a on second", "first waits for second", "launch a on first"),
        *("second waits for compute", "copy b on second", "first waits for second", "launch b on first"),
    ]
    log.clear()
    works[0].wait()
    assert log == ["compute waits for event of first", "second waits for event of compute"], "memory of copies is free"
    stream.join()
    assert log[2:] == ["compute waits for second", "compute waits for first"]


@pytest.mark.parametrize("simulated", [False, True])
def test_buffers_live_until_the_work_has_been_waited_for(simulated: bool) -> None:
    stream = stream_of(SimulatedDevice() if simulated else torch.cpu, "gather")
    buffer = Buffer()
    alive = weakref.ref(buffer)

    def start(held: Buffer) -> Any:
        return stream.run(lambda: LoggedWork([], str(held)), lambda: None)

    pending = start(buffer)
    del buffer
    gc.collect()
    assert alive() is not None
    pending.wait()
    gc.collect()
    assert alive() is None


class FinishedWork:
    def wait(self) -> None:
        """Return at once."""


@pytest.mark.parametrize("outside", [True, False])
def test_nothing_is_recorded_when_a_collective_is_launched_and_finished(outside: bool) -> None:
    recorded: list[bool] = []

    def launch() -> FinishedWork:
        recorded.append(torch.is_grad_enabled())
        return FinishedWork()

    streams = CommStreams(torch.device("cpu"))
    with torch.set_grad_enabled(outside):
        first = streams.reduce.run(launch, lambda: recorded.append(torch.is_grad_enabled()))
        second = streams.replicate.run(launch, lambda: recorded.append(torch.is_grad_enabled()), after=first)
        second.wait()
        assert torch.is_grad_enabled() == outside
    assert recorded == [False] * 4
