"""A device in virtual time: streams and events in the place of ``torch.cpu``'s that know when their work would end.

Libraries that take their streams from the device's module, as they must for any accelerator, then issue their true
schedule, and one process on a CPU says how long it would take. All times are in microseconds.

What the model leaves out: that kernels which run at once slow each other down, the caching allocator, the host's time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

__all__ = ["Charging", "Device", "Event", "Stream"]


FREE = ("_unsafe_view", "detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Operations that move nothing, though they are no views by their schema. Those of ``prim`` do not either: reading the
device of a fake tensor is one of them."""


class Event:
    """A moment in a stream: when all that it had been given by then is done."""

    def __init__(self, device: Device, **_: object) -> None:
        self._device = device
        self.time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.time = (stream or self._device.current).end

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._device.current).wait_event(self)

    def synchronize(self) -> None:
        self._device.host = max(self._device.host, self.time)

    def query(self) -> bool:
        return self._device.host >= self.time


class Stream:
    """Work that runs in order. Invariant: ``end``, when the last of it is done, never decreases within a step."""

    def __init__(self, device: Device, **_: object) -> None:
        self._device = device
        self.end = 0.0
        device.streams.append(self)

    def run(self, duration: float) -> None:
        """Work that the host launches now."""
        self.end = max(self.end, self._device.host) + duration

    def wait_until(self, time: float) -> None:
        """What follows starts no earlier than at ``time``."""
        self.end = max(self.end, time)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_until(stream.end)

    def wait_event(self, event: Event) -> None:
        self.wait_until(event.time)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._device)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._device.host = max(self._device.host, self.end)


@dataclass
class Device:
    """What runs at a given speed, and how far its host and streams have got.

    Attributes:
        flops: floating-point operations per microsecond, of matrix products.
        bandwidth: bytes per microsecond that every other operation reads and writes.
    """

    flops: float
    bandwidth: float
    host: float = 0.0
    streams: list[Stream] = field(default_factory=list)
    current: Stream = field(init=False)

    def __post_init__(self) -> None:
        self.current = Stream(self)

    @contextmanager
    def use(self, stream: Stream | None) -> Iterator[None]:
        """``torch.cpu.stream``: what is launched inside goes to ``stream``."""
        previous, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = previous

    @contextmanager
    def installed(self) -> Iterator[None]:
        """``torch.cpu`` is this device."""
        streams = {"Stream": partial(Stream, self), "Event": partial(Event, self), "stream": self.use}
        with mock.patch.multiple(torch.cpu, **streams, current_stream=lambda device=None: self.current):
            yield

    def finish(self) -> float:
        """When all that was launched is done; the clock then starts anew at 0."""
        end = max([self.host, *(stream.end for stream in self.streams)])
        self.host = 0.0
        for stream in self.streams:
            stream.end = 0.0
        return end


class Charging(TorchDispatchMode):
    """Every operation inside takes its time on the current stream of ``device``."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes back as operations on its local tensor
        result = func(*args, **(kwargs or {}))
        self._device.current.run(self._duration(func, args, kwargs or {}, result))
        return result

    def _duration(self, func: Any, args: Any, kwargs: Any, result: Any) -> float:
        packet = func.overloadpacket
        if packet in flop_registry:
            return float(flop_registry[packet](*args, **kwargs, out_val=result) / self._device.flops)
        if func.is_view or func.namespace == "prim" or packet.__name__ in FREE:
            return 0.0
        tensors = {id(t): t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)}
        return sum(t.nbytes for t in tensors.values()) / self._device.bandwidth
