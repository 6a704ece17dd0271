"""Communication streams of a device, and collectives in flight on them.

Streams come from the device's own module at run time, also on CPU, so that a simulated device sees the true schedule.
On a device whose streams are *null* (the real CPU) the host orders the work: a wait blocks the host, and the work after
a collective runs at the wait.

Memory safety needs no ``record_stream``. Every run on a stream first waits for all work that the current stream has so
far, and the current stream waits for a run before the run's buffers are dropped. So a run may write to memory of the
current stream that the host has released, and takes it: allocators keep the memory of each stream apart, so memory of a
second stream would lie idle most of the time.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import torch

from composable_fsdp._memory.device_capabilities import DeviceCapabilities, device_capabilities
from composable_fsdp.errors import LifecycleError

__all__ = ["CommStream", "CommStreams", "InFlight", "Work", "capture_error", "without_grad"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def without_grad(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` under ``no_grad``, at a quarter of the cost of ``torch.no_grad()``: that makes three objects
    per call.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        torch._C._set_grad_enabled(False)
        try:
            return function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(True)

    return run


def capture_error(name: str, why: str, remedy: str) -> LifecycleError:
    """Return the error for what a CUDA graph cannot capture."""
    return LifecycleError(f"{name} is captured into a CUDA graph, but {why}. {remedy} See docs/how-to/cuda-graphs.md.")


class Work(Protocol):
    """A launched collective."""

    def wait(self) -> object:
        """Return when the outputs may be read: by the host if collectives run there, else by the current stream."""
        ...


class InFlight(Generic[T]):
    """Launched work that owns its buffers until :meth:`wait` returns.

    Invariant: ``launch`` runs exactly once, and ``finish`` exactly once after it, however often the methods are called.
    Autograd records neither.
    """

    __slots__ = (
        *("_after", "_current_stream", "_done", "_event", "_launched_from", "_owned", "_result", "_work", "_stream"),
        "has_arrived",
    )

    def __init__(
        self, launch: Callable[[], Work], finish: Callable[[], T], after: InFlight[Any] | None, stream: CommStream
    ) -> None:
        self._stream = stream
        self._owned: tuple[Callable[[], Work], Callable[[], T]] | None = (launch, finish)
        self._after = after
        self._work: Work | None = None
        self._result: Any = None
        self._done = False
        self.has_arrived = False
        """True if the collective is done and writes to no memory any more."""
        self._event: Any = None
        self._current_stream: Callable[[], Any] | None = None
        self._launched_from: Any = None
        """The current stream at the launch, whose memory the buffers may be."""

    def start(self) -> None:
        """Launch the work, after the work that it had to wait for. On null streams this blocks until that is done."""
        if self._owned is None or self._work is not None:
            return
        if self._after is not None:
            self._after.wait()
            self._after = None
        grad_mode = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            self._work = self._owned[0]()
        finally:
            torch._C._set_grad_enabled(grad_mode)

    def wait(self) -> T:
        """Return the result. The current stream (on null streams: the host) continues only once the work is done."""
        current = None
        if self._event is not None and self._current_stream is not None:
            current = self._current_stream()
            current.wait_event(self._event)
        if not self._done:
            self._complete()
            # The memory of the messages returns to the stream, and others may wait for the result too.
            self._event, self._current_stream = self._stream.wait_for_current()
        if self._owned is not None and current is not None and current != self._launched_from:
            self._launched_from.wait_event(current.record_event())  # the memory of the messages may return to it
        self._owned = self._work = None
        result: T = self._result
        return result

    def synchronize(self) -> T:
        """Like :meth:`wait`, but block the host too, for results that it will read.

        Raises:
            LifecycleError: the stream is captured into a CUDA graph.
        """
        result = self.wait()
        if self._event is not None:
            if self._stream.device.is_capturing():
                why = "the host must read which unused parameters have a gradient on another rank"
                remedy = "Use all parameters, or call set_reduce_scatter_unused_params(True)."
                raise capture_error("a backward", why, remedy)
            self._event.synchronize()
        return result

    def enqueue(self, stream: Any, current_stream: Callable[[], Any], launched_from: Any, *, finishes: bool) -> None:
        """Enqueue the work on ``stream``, which is the current one, without blocking the host.

        Args:
            stream: its event orders waiters: a collective without communication is nothing but copies on ``stream``.
            current_stream: returns the current stream.
            launched_from: the stream that was the current one before.
            finishes: enqueue what follows the collective too.
        """
        if self._after is not None:
            stream.wait_event(self._after._event)
            self._after = None
        if finishes:
            self._complete()
        else:
            self.start()
        self._event, self._current_stream = stream.record_event(), current_stream
        self._launched_from = launched_from

    def _complete(self) -> None:
        if self._work is None:
            self.start()
        assert self._owned is not None
        assert self._work is not None
        grad_mode = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            begin = time.perf_counter()
            self._work.wait()
            self._stream.seconds_waited += time.perf_counter() - begin
            self.has_arrived = True
            self._result = self._owned[1]()
        finally:
            torch._C._set_grad_enabled(grad_mode)
        self._done = True


class CommStream:
    """A named stream that collectives are launched on.

    Args:
        name: its name.
        device: the capabilities of the device.
        priority: negative numbers are higher.
        copies_ahead: what comes before a collective runs on a second stream, which does not wait for earlier ones.
    """

    def __init__(self, name: str, device: DeviceCapabilities, priority: int, *, copies_ahead: bool = False) -> None:
        self.name = name
        self.device = device
        self._module = device.module
        self._stream = device.module.Stream(priority=priority)
        self._first = device.module.Stream(priority=priority) if copies_ahead else self._stream
        """The stream on which a run begins. The other one waits for it in each run, and so for what it has waited."""
        self._is_null = not device.has_streams
        self.seconds_waited = 0.0
        """The seconds for which the host was blocked by waits for collectives, on a null stream."""

    def wait_event(self, event: Any) -> None:
        """Order everything that runs on this stream from now on after ``event``."""
        if not self._is_null:
            self._first.wait_event(event)

    def wait_for_current(self) -> tuple[Any, Callable[[], Any]]:
        """Order everything that runs on this stream from now on after what the current stream runs until now.

        Returns:
            the event in the current stream, ``None`` on null streams, and the function that returns the current stream.
        """
        event = None
        if not self._is_null:
            event = self._module.current_stream().record_event()
            self._first.wait_event(event)
        return event, self._module.current_stream

    def join(self) -> None:
        """Order the current stream after everything that runs on this stream until now."""
        if not self._is_null:
            for stream in dict.fromkeys((self._first, self._stream)):
                self._module.current_stream().wait_stream(stream)

    def run(
        self,
        launch: Callable[[], Work],
        finish: Callable[[], T],
        *,
        allocate: Callable[[], None] | None = None,
        prepare: Callable[[], None] | None = None,
        after: InFlight[Any] | None = None,
        finish_in_wait: bool = False,
    ) -> InFlight[T]:
        """Launch a collective and, when it is done, run ``finish`` on the same stream.

        Args:
            launch: prepares buffers and launches. Everything in its closure stays alive until the work has been waited
                for.
            finish: makes the result from the outputs of the collective.
            allocate: allocates buffers of ``launch`` on the current stream. Not called on null streams, where
                ``launch`` allocates them.
            prepare: copies and encodes what ``launch`` sends, ahead of earlier collectives if the stream does so. Not
                called on null streams, where ``launch`` does it.
            after: work on another stream that must be done first. What is in its closure must be in those of ``launch``
                or ``finish`` too: it stays alive until this work has been waited for.
            finish_in_wait: run ``finish`` on the stream that waits. On null streams it always does.
        """
        pending = InFlight(launch, finish, after, self)
        if not self._is_null:
            if allocate is not None:
                allocate()
            current = self._module.current_stream()
            self._first.wait_stream(current)
            try:
                if prepare is not None:
                    with self._module.stream(self._first):
                        without_grad(prepare)()
                if self._first is not self._stream:
                    self._stream.wait_stream(self._first)
                with self._module.stream(self._stream):
                    pending.enqueue(self._stream, self._module.current_stream, current, finishes=not finish_in_wait)
            except BaseException:
                self.join()  # copies may still use buffers, for which nothing waits now
                raise
        elif after is None:
            grad_mode = torch.is_grad_enabled()  # inlined from start(): every collective on the host comes here
            torch._C._set_grad_enabled(False)
            try:
                pending._work = launch()
            finally:
                torch._C._set_grad_enabled(grad_mode)
        return pending


class CommStreams:
    """The communication streams of one device: all-gather, reduce-scatter, and all-reduce over the replicate axis.

    Shards of the next all-gather are copied, also from the host, beside the all-gather in flight, as in FSDP2.
    """

    __slots__ = ("device", "gather", "reduce", "replicate")  # torch's clients would set other attributes without effect

    def __init__(self, device: torch.device) -> None:
        self.device = device_capabilities(device)
        self.gather = CommStream("gather", self.device, priority=-1, copies_ahead=True)
        self.reduce = CommStream("reduce", self.device, priority=-1)
        self.replicate = CommStream("replicate", self.device, priority=-1)

    @property
    def seconds_waited(self) -> float:
        """The seconds for which the host was blocked by waits for collectives, if waits block it."""
        return self.gather.seconds_waited + self.reduce.seconds_waited + self.replicate.seconds_waited
