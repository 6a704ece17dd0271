"""A device in virtual time: streams and events that replace those of ``torch.cpu`` and compute when their work ends.

Libraries that take their streams from the device's module, as they must for any accelerator, then launch their real
schedule, and one process on a CPU computes how long it would take. All times are in microseconds.

The order of work does not depend on times, so a step can be recorded once and repeated over other networks
(``Device.recorded``).

The model does not include the slowdown of concurrent kernels, the caching allocator and the host's time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

__all__ = ["WAIT", "Charging", "Device", "Event", "Span", "Stream"]


FREE = (
    *("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "detach"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
)
"""Operations that move no data, although their schema does not mark them as views.

Operations of ``prim`` move no data either. One of them reads the device of a fake tensor.
"""


class Event:
    """A point in a stream: the time at which all work that was given to it before is done."""

    def __init__(self, device: Device, **_: object) -> None:
        self._device = device
        self._time = 0.0
        self._restarts = 0

    @property
    def time(self) -> float:
        """The time at which the work is done: 0 for work before the last restart of the clock."""
        return self._time if self._restarts == self._device.restarts else 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._device.do(partial(self._record, stream or self._device.current))

    def _record(self, stream: Stream) -> None:
        self._time, self._restarts = stream.end, self._device.restarts

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._device.current).wait_event(self)

    def synchronize(self) -> None:
        self._device.do(lambda: self._device.wait_on_host(self.time))

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds from this moment to ``end``."""
        return (end.time - self.time) / 1e3

    def query(self) -> bool:
        return self._device.restarts > self._restarts or self._device.host >= self.time


WAIT = "wait"
"""The name of the host's waits in a log."""


class Span(NamedTuple):
    """Work in the log of a device: where it ran, from when to when, and its name."""

    place: str
    begin: float
    end: float
    what: str


class Stream:
    """Work that runs in order. Invariant: ``end``, the time at which all is done, never decreases within a step."""

    def __init__(self, device: Device, **_: object) -> None:
        self._device = device
        self.end = 0.0
        device.streams.append(self)

    def run(self, duration: float, what: str = "", link: str = "") -> None:
        """Launch work now, of the name ``what``. A copy also waits for its ``link``, which serves one at a time."""
        if duration:
            self._device.do(partial(self._run, duration, what, link))

    def _run(self, duration: float, what: str, link: str) -> None:
        begin = max(self.end, self._device.host, self._device.links.get(link, 0.0))
        self.end = begin + duration
        if link:
            self._device.links[link] = self.end
        self._device.note(self, begin, self.end, what)

    def wait_until(self, time: Callable[[], float]) -> None:
        """Delay later work until the ``time`` of what it waits for."""
        self._device.do(lambda: self._wait_until(time()))

    def _wait_until(self, time: float) -> None:
        self.end = max(self.end, time)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_until(lambda: stream.end)

    def wait_event(self, event: Event) -> None:
        self.wait_until(lambda: event.time)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._device)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._device.do(lambda: self._device.wait_on_host(self.end))


@dataclass
class Device:
    """A device with a given speed, and the current times of its host and streams.

    Attributes:
        flops: the floating-point operations per microsecond of matrix products.
        bandwidth: the bytes per microsecond that every other operation reads and writes.
        restarts: how often the clock has begun at 0 again. All earlier work is done.
        links: the times at which links to the host are free, by name.
        log: a list that gets all work, if there is one.
    """

    flops: float
    bandwidth: float
    host: float = 0.0
    restarts: int = 0
    streams: list[Stream] = field(default_factory=list)
    links: dict[str, float] = field(default_factory=dict)
    current: Stream = field(init=False)
    log: list[Span] | None = None

    def __post_init__(self) -> None:
        self.current = Stream(self)
        self._recording: list[Callable[[], None]] | None = None

    def do(self, work: Callable[[], None]) -> None:
        """Perform ``work``, which moves clocks, and record it."""
        work()
        if self._recording is not None:
            self._recording.append(work)

    def note(self, place: Stream | str, begin: float, end: float, what: str) -> None:
        """Add work to the log."""
        if self.log is not None:
            name = f"stream {self.streams.index(place)}" if isinstance(place, Stream) else place
            self.log.append(Span(name, begin, end, what))

    @contextmanager
    def recorded(self) -> Iterator[list[Callable[[], None]]]:
        """Yield a list of all work until the end of the context. To call its items repeats the work."""
        self._recording = []
        try:
            yield self._recording
        finally:
            self._recording = None

    def wait_on_host(self, time: float) -> None:
        """Delay the host until ``time``."""
        if time > self.host:
            self.note("host", self.host, time, WAIT)
            self.host = time

    def work_on_host(self, duration: float, what: str) -> None:
        """Delay the host by work of its own."""
        self.do(partial(self._work_on_host, duration, what))

    def _work_on_host(self, duration: float, what: str) -> None:
        self.note("host", self.host, self.host + duration, what)
        self.host += duration

    @contextmanager
    def use(self, stream: Stream | None) -> Iterator[None]:
        """A replacement of ``torch.cpu.stream``: work inside is launched on ``stream``."""
        previous, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = previous

    @contextmanager
    def installed(self, module: Any = torch.cpu) -> Iterator[None]:
        """Replace the streams and events of ``module`` by those of this device."""
        streams = {"Stream": partial(Stream, self), "Event": partial(Event, self), "stream": self.use}
        with (
            mock.patch.multiple(module, create=True, **streams, current_stream=lambda device=None: self.current),
            mock.patch.object(torch, "empty", _pageable),
        ):
            yield

    def finish(self) -> float:
        """Return the time at which all launched work is done, and restart the clock at 0."""
        end = max([self.host, *(stream.end for stream in self.streams)])
        self.host = 0.0
        self.restarts += 1
        self.links.clear()
        for stream in self.streams:
            stream.end = 0.0
        return end


_empty = torch.empty


def _pageable(*sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
    """Return ``torch.empty``: without an accelerator, torch has no page-locked memory."""
    return _empty(*sizes, **options)


class Charging(TorchDispatchMode):
    """A mode in which every operation takes time on the current stream of ``device``."""

    observes_sharding = True

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # is dispatched again as operations on its local tensor
        result = func(*args, **(kwargs or {}))
        self._charge(func, args, kwargs or {}, result)
        return result

    def _charge(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self._device.current.run(self._duration(func, args, kwargs, result), func.overloadpacket.__name__)

    def _duration(self, func: Any, args: Any, kwargs: Any, result: Any) -> float:
        packet = func.overloadpacket
        if packet in flop_registry:
            return float(flop_registry[packet](*args, **kwargs, out_val=result) / self._device.flops)
        if func.is_view or func.namespace == "prim" or packet.__name__ in FREE:
            return 0.0
        tensors = {id(t): t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)}
        return sum(t.nbytes for t in tensors.values()) / self._device.bandwidth
