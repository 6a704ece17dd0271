"""Capabilities of devices and backends, streams and the work in flight on them, and buffers of full parameters."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from types import ModuleType
from typing import Any, Generic, ParamSpec, Protocol, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist

from composable_fsdp._core.layout import FlatLayout, TensorShards
from composable_fsdp.errors import LifecycleError

_STAGES_THROUGH_HOST = ("", "gloo")
"""Backends that are not native to an accelerator, or none at all."""
_WITHOUT_PROCESSES = ("fake", "threaded", "simulated_accelerator", "simulated_accelerator_alone")
"""Backends without other processes, or without a device that completes work by itself."""

_AVERAGING = {"ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy"}
_COALESCING = {"ProcessGroupNCCL"}
"""Classes of backends, since ``"nccl"`` names several: by release, an environment variable, and torchcomms. Other
classes have neither ability. ``ProcessGroupNCCL2`` has the coalesced calls too, but they launch once per tensor.
"""


@dataclass(frozen=True, slots=True)
class DeviceCapabilities:
    """The abilities of one kind of device.

    Args:
        module: the module of torch with its streams and events.
        has_streams: work runs on streams, and a wait orders streams. Otherwise streams are *null*: the host orders the
            work, and a wait for a collective blocks it. On streams, one kernel that concatenates or splits many
            tensors also casts them, at the cost of one copy.
    """

    module: ModuleType
    has_streams: bool

    def is_capturing(self) -> bool:
        """Return whether the current stream is captured, into a CUDA graph."""
        return bool(getattr(self.module, "is_current_stream_capturing", bool)())


def device_capabilities(device: torch.device) -> DeviceCapabilities:
    """Return the capabilities of ``device``. They are made once, and again where streams are simulated for a while."""
    module = torch.get_device_module(device)
    return _capabilities(module, module.Stream)


@lru_cache(maxsize=4)
def _capabilities(module: ModuleType, stream_class: object) -> DeviceCapabilities:
    # Not a new stream: torch has 32 per priority, and each request takes the next one.
    return DeviceCapabilities(module, has_streams=module.current_stream().record_event() is not None)


@dataclass(frozen=True, slots=True)
class BackendCapabilities:
    """The abilities of a process group for tensors on one kind of device.

    Args:
        name: the name of the backend; an empty text if the process group has none for this kind of device.
        averages: reductions can compute averages.
        coalesces: several all-gathers, or several reduce-scatters, can be one launch.
        is_watchable: operations run in processes with a store, and can be lost and aborted.
        has_own_transports: the library has transports of its own, in shared memory and over this backend.
    """

    name: str
    averages: bool
    coalesces: bool
    is_watchable: bool
    has_own_transports: bool

    @property
    def is_native(self) -> bool:
        """True if the backend moves the memory of an accelerator without staging it through the host."""
        return self.name not in _STAGES_THROUGH_HOST


def backend_capabilities(group: dist.ProcessGroup, device_type: str) -> BackendCapabilities:
    """Return the capabilities of ``group`` for tensors on ``device_type``.

    ``dist.get_backend`` returns what ``init_process_group`` was given: ``"cpu:gloo,cuda:nccl"`` as it is, and
    ``"undefined"`` if it was given nothing.
    """
    # "cpu:gloo,cuda:nccl" has one backend for each kind of device.
    backends = dict(part.split(":") for part in str(dist.get_backend_config(group)).split(",") if ":" in part)
    name = backends.get(device_type, "")
    backend: Any = group  # a process group in Python is its own backend
    if type(group) is dist.ProcessGroup:
        device = torch.device(device_type)
        backend = group._get_backend(device) if device in group._device_types else None
    wrapped = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL: has no coalesced calls
    classes, wrapped_classes = (frozenset(base.__name__ for base in type(b).__mro__) for b in (backend, wrapped))
    return BackendCapabilities(
        name=name,
        averages=bool(_AVERAGING & wrapped_classes),
        coalesces=bool(_COALESCING & classes),
        is_watchable=name not in _WITHOUT_PROCESSES,
        has_own_transports=device_type == "cpu" and "ProcessGroupGloo" in wrapped_classes,
    )


def is_host(device: torch.device) -> bool:
    """Return whether ``device`` is the memory of the host."""
    return device.type == "cpu"


def is_accelerator(device: torch.device) -> bool:
    """Return whether ``device`` has memory of its own."""
    return device.type not in ("cpu", "meta")


def current_accelerator() -> torch.device | None:
    """Return the kind of accelerator of this machine, without an index; ``None`` if there is none."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def current_device(device_type: str) -> torch.device:
    """Return the device of this type on which this process computes."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


Current: TypeAlias = Callable[[], torch.Stream]
"""Returns the current stream."""

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Key = TypeVar("Key")
Item = TypeVar("Item")


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


# Note: streams and whose memory
#
# The caching allocator gives a freed block to the next request of the stream that allocated it, without a wait. So the
# stream that allocates a buffer must be ordered after each other stream that uses it, before the buffer is released:
#   - full parameters are allocated and freed on the current stream, which waits for the all-gather before modules read
#     them, and for which the gather stream waits before it writes (``wait_stream`` in ``CommStream.run``);
#   - messages are allocated on the current stream or on that of the collective. ``InFlight`` owns them until its wait,
#     and orders the allocating stream after their last use.
# No ``record_stream``: it would delay the reuse of memory until an event is polled, by an unknown number of steps.
# On the CPU there are no streams (null streams): the host waits for each collective, and nothing above has an effect.


class InFlight(Generic[T]):
    """Launched work that owns its buffers until :meth:`wait` returns.

    Invariant: ``launch``, then ``finish``, succeed at most once, however often the methods are called: after an error
    the next wait tries again. Autograd records neither.
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
        self._result = cast(T, None)
        self._done = False
        self.has_arrived = False
        """True if the collective is done and writes to no memory any more."""
        self._event: torch.Event | None = None
        self._current_stream: Current | None = None
        self._launched_from: torch.Stream | None = None
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
        # The first wait completes the work; later ones return its result.
        if not self._done:
            self._complete()
            # The memory of the messages returns to the stream, and others may wait for the result too.
            if self._stream.device.has_streams:
                self._event, self._current_stream = self._stream.wait_for_current()
        # Messages go back to the stream they were allocated on.
        if self._owned is not None and current is not None and current != self._launched_from:
            assert self._launched_from is not None
            # Note: streams and whose memory. The memory of the messages may return to it.
            self._launched_from.wait_event(current.record_event())
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

    def enqueue(
        self, stream: torch.Stream, current_stream: Current, launched_from: torch.Stream, *, finishes: bool
    ) -> None:
        """Enqueue the work on ``stream``, which is the current one, without blocking the host.

        Args:
            stream: its event orders waiters: a collective without communication is nothing but copies on ``stream``.
            current_stream: returns the current stream.
            launched_from: the stream that was the current one before.
            finishes: enqueue what follows the collective too.
        """
        if self._after is not None:
            assert self._after._event is not None
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
            # The host is blocked here on the CPU; on streams this orders the current one.
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
        self._copy_stream = device.module.Stream(priority=priority) if copies_ahead else self._stream
        """The stream on which a run begins, with copies. The other one waits for it in each run."""
        self._is_null = not device.has_streams
        self.seconds_waited = 0.0
        """The seconds for which the host was blocked by waits for collectives, on a null stream."""

    def wait_event(self, event: torch.Event) -> None:
        """Order everything that runs on this stream from now on after ``event``."""
        if not self._is_null:
            self._copy_stream.wait_event(event)

    def wait_for_current(self) -> tuple[torch.Event, Current]:
        """Order everything that runs on this stream from now on after what the current stream runs until now.

        Not to be called on null streams.

        Returns:
            the event in the current stream, and the function that returns the current stream.
        """
        event = self._module.current_stream().record_event()
        self._copy_stream.wait_event(event)
        return event, self._module.current_stream

    def join(self) -> None:
        """Order the current stream after everything that runs on this stream until now."""
        if not self._is_null:
            for stream in dict.fromkeys((self._copy_stream, self._stream)):
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

        On null streams, work with ``after`` is launched by :meth:`InFlight.start` or its wait.

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
            # Allocate on the current stream, whose memory is reused in its order.
            if allocate is not None:
                allocate()
            current = self._module.current_stream()
            self._copy_stream.wait_stream(current)
            try:
                # Copy and encode beside the collective before this one.
                if prepare is not None:
                    with self._module.stream(self._copy_stream):
                        without_grad(prepare)()
                # Launch after that, on the stream of collectives.
                if self._copy_stream is not self._stream:
                    self._stream.wait_stream(self._copy_stream)
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


def cast_and_move(shard: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return ``shard`` as ``dtype`` on ``device``, or ``shard`` itself if nothing changes. One kernel per bucket.

    A copy from page-locked host memory does not block the host.
    """
    if shard.dtype == dtype and shard.device == device:  # a tenth of the time of two conversions that do nothing
        return shard
    return shard.to(device, non_blocking=True).to(dtype)


class ShardStore:
    """The shards of ``rank`` in ``flat``. Invariant: padding is zero until user code writes to it.

    Args:
        shards: how the parameters are sharded.
        layout: offsets of the shards in ``flat``.
        rank: the rank that owns the shards.
        flat: 1-d memory, with padding of zeros.

    Attributes:
        locals: each parameter's shard, contiguous, shaped, without padding.
    """

    def __init__(self, shards: Sequence[TensorShards], layout: FlatLayout, rank: int, flat: torch.Tensor) -> None:
        self.flat = flat
        shapes = [s.shard_shape(rank) for s in shards]
        self.locals = [view_at(flat, offset, shape) for offset, shape in zip(layout.offsets, shapes, strict=True)]


def zero_padding(flat: torch.Tensor, layout: FlatLayout, shards: Sequence[TensorShards], rank: int) -> None:
    """Write zeros to ``flat`` except where the shards of ``rank`` are, whose pages of memory stay unused."""
    end = 0
    for offset, length in sorted(zip(layout.offsets, (prod(s.shard_shape(rank)) for s in shards), strict=True)):
        if end < offset:
            flat[end:offset].zero_()
        end = max(end, offset + length)
    if end < layout.numel:
        flat[end:].zero_()


class OwnedBuffer:
    """The memory of one bucket's full parameters, freed between uses. Allocated at first, so that it has views."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._flat = torch.empty(numel, dtype=dtype, device=device)
        self._storage = self._flat.untyped_storage()
        self._writable = self._flat.data
        self._full_nbytes = numel * dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self._storage.nbytes()

    def allocate(self) -> None:
        if not self._storage.nbytes():
            self._storage.resize_(self._full_nbytes)

    def free(self) -> None:
        self._storage.resize_(0)

    def region(self, offset: int, length: int) -> torch.Tensor:
        return self._writable[offset : offset + length]

    def parameter_data(self, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        return view_at(self._flat.data, offset, shape)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of ``shape``."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def view_at(flat: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the contiguous view of ``shape`` at ``offset`` elements from the start of ``flat``."""
    return flat.as_strided(shape, contiguous_strides(shape), flat.storage_offset() + offset)


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that random operations on ``device`` use."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    module.init()
    return cast(torch.Generator, module.default_generators[device.index])


def widest_float(device: torch.device) -> torch.dtype:
    """Return the widest floating-point dtype of ``device``: Apple's has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def group_by_key(keys: Iterable[Key], members: Iterable[Item]) -> list[tuple[Key, list[Item]]]:
    """Group members with equal keys, in the order of the first of each: the same on every rank."""
    keys, members = list(keys), list(members)
    if keys and keys.count(keys[0]) == len(keys) == len(members):  # usually one communicator: skip hashing it
        return [(keys[0], members)]
    found: dict[Key, list[Item]] = {}
    for key, member in zip(keys, members, strict=True):
        found.setdefault(key, []).append(member)
    return list(found.items())
