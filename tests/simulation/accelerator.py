"""A simulated accelerator that finds accesses to memory which its streams do not order. Streams and events replace
those of ``torch.cpu`` and keep vector clocks. Tensors are real CPU tensors, and operations run at once, in the order of
the host, so results are those of the host. Every operation is an access to byte ranges of its tensors on the current
stream, and a collective of the backend ``"simulated_accelerator"`` is one on a stream of its process group's own, as
with NCCL. Two accesses to one range, at least one of them a write, must be ordered by streams and events, or by a
synchronization of the host between them. Freed memory goes to the pool of the stream that it was allocated on, as in
torch's CUDA caching allocator. The next allocation on that stream may get it, so by then all accesses on other streams
must be ordered before that stream. ``Tensor.record_stream`` exempts memory from that. All memory is the device's,
except *host memory*: tensors made with ``pin_memory=True`` or by ``pin_memory()``, copies by ``cpu()``, and the results
of operations on such tensors alone. Those operations run on the host, after work for which the host has waited: by a
``synchronize``, by a copy between host and device that is not ``non_blocking`` or not of pinned memory, or by an
operation that returns values of device memory to the host (``item``, ``tolist``, ``numpy``, ``nonzero``), which waits
for the current stream. ``tensor.to("cpu:0")`` copies host memory to the device. Not simulated: time, other devices, and
accesses of the host that are no operations of torch, such as those through ``data_ptr()`` or an array of numpy that is
kept."""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial, partialmethod
from itertools import count
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

import composable_fsdp.plan  # noqa: F401 (schedule() imports it, and it derives from classes that are replaced here)
from tests.simulation.late_execution import Action, Recording, fill, leaves
from tests.simulation.rules import break_rule, note_violation, reported

_NO_ACCESS = ("detach", "alias", "_unsafe_view", "lift_fresh", "unsafe_split", "unsafe_split_with_sizes")
"""Operations that read and write nothing, although their schema does not mark them as views."""
_NO_WRITE = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
"""Operations that allocate memory and write nothing."""
_COPIES = ("copy_", "_foreach_copy_", "_to_copy", "_pin_memory", "clone")
"""Operations that may copy between host and device."""
_NOTED_ELSEWHERE = ("prim", "profiler", "c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of operations that access no memory, or that the process group notes."""
ASYNCHRONOUS, SYNCHRONOUS = "asynchronous ", "synchronous "
"""The first word of an operation of a stand-in for NCCL."""
_MOST_RUNS = 64
"""A tensor with more contiguous parts than this counts as everything from its first to its last byte."""
_FRAMES = 8
_HIDDEN = (
    "/torch/utils/",
    "/torch/_ops.py",
    "/torch/_compile.py",
    "/torch/_dynamo/",
    "contextlib.py",
    "/torch/nn/modules/module.py",
)
"""Parts of the names of files whose frames are left out of stacks."""
_LABELS = logging.getLogger("torch.distributed.fsdp.fully_shard")
"""The logger to which this library and torch's FSDP2 write the label of each operation."""

_Clock = dict[int, int]
"""A vector clock: of each stream, by its number, the number of its operations that are ordered before."""
_Runs = tuple[tuple[int, int], ...]
"""Byte ranges of a storage, each from its first byte to the one after its last."""


def _join(clock: _Clock, other: _Clock) -> None:
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


@dataclass(frozen=True, slots=True)
class _CallSite:
    """An operation, the last label before it, and its stack. It becomes a text only if it is reported."""

    operation: str
    label: str
    frames: tuple[tuple[CodeType, int], ...]

    @property
    def is_collective(self) -> bool:
        """True for an operation of a stand-in for NCCL."""
        return self.operation.startswith((ASYNCHRONOUS, SYNCHRONOUS))

    def __str__(self) -> str:
        label = f" after {self.label}" if self.label else ""
        frames = (f"{_name(code).rpartition('/')[2]}:{line} {code.co_name}" for code, line in self.frames)
        return f"{self.operation}{label} at {' < '.join(frames)}"


@cache
def _name(code: CodeType) -> str:
    """Return the name of the file of ``code``, or an empty text if stacks leave it out."""
    name = code.co_filename
    return "" if name == __file__ or any(part in name for part in _HIDDEN) else name


@dataclass(frozen=True, slots=True)
class _Access:
    stream: SimulatedStream
    number: int
    is_write: bool
    runs: _Runs
    what: _CallSite

    def is_before(self, clock: _Clock) -> bool:
        return clock.get(self.stream.number, 0) >= self.number

    def overlaps(self, runs: _Runs) -> bool:
        return any(a < d and c < b for a, b in self.runs for c, d in runs)

    def __str__(self) -> str:
        return f"{'write' if self.is_write else 'read'} on {self.stream} by {self.what}"


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses to the same memory that no stream orders. ``kind``: ``"read"`` or ``"write"``, that of the second
    access, or ``"reuse"`` if freed memory may be in use. ``memory``: the allocation of the memory. ``first``: the
    earlier access in the order of the host. ``second``: the later access, or the allocation that may get the memory."""

    kind: str
    memory: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"unordered {self.kind} of {self.memory}\n  first:  {self.first}\n  second: {self.second}"


@dataclass(eq=False)
class _Block:
    """Memory of one storage, from its allocation until it is freed."""

    stream: SimulatedStream
    what: _CallSite
    is_host: bool = False
    is_pinned: bool = False
    number: int = 0
    """Its number in the recording, if there is one."""
    accesses: list[_Access] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)
    """The streams given to ``record_stream``."""


class SimulatedEvent:
    """A point of a stream. It orders what waits for it after all work that the stream had when it was recorded."""

    def __init__(self, accelerator: SimulatedAccelerator, **_: object) -> None:
        self._accelerator = accelerator
        self._clock: _Clock = {}
        self._is_recorded = False
        self._capture = 0

    def record(self, stream: SimulatedStream | None = None) -> None:
        stream = stream or self._accelerator.current
        self._accelerator.check_thread("Event.record()")
        self._is_recorded = True
        self._capture = stream.capture
        self._clock = dict(stream.clock)

    def wait(self, stream: SimulatedStream | None = None) -> None:
        stream = stream or self._accelerator.current
        self._accelerator.check_thread("Event.wait()")
        if self._is_recorded:
            stream.follow(self._capture, "an event")
        _join(stream.clock, self._clock)

    def synchronize(self) -> None:
        self._accelerator.check_host("Event.synchronize()")
        _join(self._accelerator.host.clock, self._clock)

    def query(self) -> bool:
        self._accelerator.check_host("Event.query()")
        return self.is_done

    @property
    def is_done(self) -> bool:
        """What :meth:`query` returns, for the simulation itself."""
        return all(self._accelerator.host.clock.get(stream, 0) >= number for stream, number in self._clock.items())

    def __del__(self) -> None:
        self._accelerator.check_destructor("an event")


class SimulatedStream:
    """Work that runs in order."""

    def __init__(self, accelerator: SimulatedAccelerator, *_: object, name: str = "", **__: object) -> None:
        self.accelerator = accelerator
        self.number = next(accelerator.numbers)
        self.name = name
        self.clock: _Clock = {}
        self.capture = 0
        """The number of the capture that has this stream; 0 for none."""
        accelerator.streams.append(self)

    def __str__(self) -> str:
        return f"stream {self.number}{self.name and f' ({self.name})'}" if self.number >= 0 else "the host"

    def advance(self) -> int:
        """Begin an operation, after all that the host has waited for. Return its number."""
        if self.accelerator.capture_number != self.capture and self is not self.accelerator.host:
            break_rule("capture: fork", f"{self} works outside of the capture.")
        _join(self.clock, self.accelerator.host.clock)
        number = self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return number

    def follow(self, capture: int, what: str) -> None:
        """Take part in the capture in which what this stream waits for was recorded."""
        if self.capture and capture != self.capture:
            break_rule("capture: isolation", f"{self}, which is captured, waits for {what} outside of the capture.")
        if capture and capture != self.accelerator.capture_number:
            break_rule("capture: isolation", f"{self} waits for {what} of a capture that has ended.")
        if capture == self.accelerator.capture_number:
            self.capture = capture

    def wait_stream(self, stream: SimulatedStream) -> None:
        self.accelerator.check_thread("Stream.wait_stream()")
        self.follow(stream.capture, str(stream))
        _join(self.clock, stream.clock)

    def wait_event(self, event: SimulatedEvent) -> None:
        event.wait(self)

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        event = event or SimulatedEvent(self.accelerator)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.accelerator.check_host("a wait of the host for a stream")
        _join(self.accelerator.host.clock, self.clock)

    def query(self) -> bool:
        return self.record_event().query()


class SimulatedAccelerator:
    """Streams, memory and the races found so far."""

    def __init__(self, recording: Recording | None = None) -> None:
        self.numbers = count(-1)
        self.recording = recording
        self.capture_number = 0
        """The number of the capture that is going on; 0 for none."""
        self._captures = count(1)
        self._thread = threading.local()
        self.set_device()
        self.keeps_contract = False
        """True once a stand-in for NCCL has run here: its races are violations of rules."""
        self.streams: list[SimulatedStream] = []
        self.host = SimulatedStream(self, name="host")
        """The operations of the host. Its clock has those of streams for which the host has waited."""
        self.default = self.current = SimulatedStream(self, name="default")
        self.races: list[Race] = []
        """The races, each pair of places once."""
        self.label = ""
        """The last label of an operation that FSDP has logged."""
        self._blocks: dict[int, _Block] = {}
        """The memory in use, by address."""
        self._addresses: dict[int, int] = {}
        """The address of each live storage whose end is awaited, by its own address."""
        self._freed: dict[int, list[_Block]] = defaultdict(list)
        """The freed memory that the next allocation on a stream may get, by stream."""

    @contextmanager
    def use(self, stream: SimulatedStream | None) -> Iterator[None]:
        previous, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = previous

    def set_device(self, device: object = None) -> None:
        """Set the device of this thread. The thread that opens the accelerator has done so."""
        self._thread.has_device = True

    def is_capturing(self) -> bool:
        """Return whether the current stream is captured."""
        return bool(self.current.capture)

    def check_thread(self, what: str, rule: str = "device of the thread") -> None:
        """Raise a violation if the calling thread has not set its device."""
        if not getattr(self._thread, "has_device", False):
            break_rule(rule, f"{what} in the thread {threading.current_thread().name!r}.")

    def check_host(self, what: str) -> None:
        """Raise a violation if the host may not wait or query now, in this thread."""
        self.check_thread(what)
        if self.capture_number:
            break_rule("capture: host", f"{what} while a stream is captured.")

    def check_destructor(self, what: str) -> None:
        """Note a violation if the calling thread has not set its device. Destructors cannot raise."""
        if self in active and not getattr(self._thread, "has_device", False):
            name = threading.current_thread().name
            note_violation("device of a destructor", f"{what} is destroyed in the thread {name!r}.")

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture the current stream, as ``torch.cuda.graph`` does. Operations run once, as on any stream."""
        origin, self.capture_number = self.current, next(self._captures)
        origin.capture = self.capture_number
        try:
            yield
            for stream in self.streams:
                if stream.capture and origin.clock.get(stream.number, 0) < stream.clock.get(stream.number, 0):
                    break_rule("capture: join", f"{origin} has not waited for the end of {stream}.")
        finally:
            self.capture_number = 0
            for stream in self.streams:
                stream.capture = 0

    def synchronize(self, device: object = None) -> None:
        """Block the host until all work is done."""
        self.check_host("synchronize()")
        for stream in self.streams:
            _join(self.host.clock, stream.clock)

    def run_late(self, seed: int) -> list[str]:
        """Execute the recorded operations again, each stream as late as ``seed`` says. Return what differs. Call it
        after the context that ``records``. ``seed``: chooses the order. 0 prefers the default stream, 1 prefers it
        least, and others are random. Returns the first operations that write or return other bits than in the order of
        the host, and memory that has other bits at the end."""
        if self.recording is None:
            raise RuntimeError("run_late needs recorded operations: use simulated_accelerator(records=True).")
        return self.recording.run_late(seed)

    def access(
        self,
        operation: str,
        reads: Iterable[torch.Tensor],
        writes: Iterable[torch.Tensor],
        action: Callable[[Recording], Action] | None = None,
    ) -> None:
        number, what = self.current.advance(), self._here(operation)
        if self.recording is not None and action is not None:
            self._record(what, action(self.recording))
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                block = self.block_of(tensor, operation)
                if block is not None:
                    self._note(block, _Access(self.current, number, is_write, _runs(tensor), what))

    def allocate(
        self, storage: torch.UntypedStorage, operation: str, *, fills: bool = False, keeps: bool = False
    ) -> _Block:
        """Note that ``storage`` has got memory on the current stream. ``fills``: if operations are recorded, fill the
        memory. ``keeps``: the memory is older than the accelerator."""
        stream, what = self.current, self._here(f"{storage.nbytes()} bytes allocated by {operation}")
        _join(stream.clock, self.host.clock)
        for block in self._freed.pop(stream.number, ()):
            late = next((a for a in block.accesses if self._may_run(a, block, stream)), None)
            if late is not None:
                rule = "held" if late.what.is_collective else ""
                self._report(Race("reuse", str(block.what), str(late), f"{what} on {stream}"), rule)
            if self.recording is not None:
                stream.advance()
                after = {a.stream.number: a.number for a in block.accesses if a.stream.number in block.recorded}
                self._record(what, self.recording.reuse(block.number, block.what), after)
        number = 0
        if self.recording is not None:
            number = self.recording.allocate(storage, what, fills=fills, keeps=keeps)
            if fills:
                stream.advance()
                self._record(what, fill(number))
        address = storage.data_ptr()
        block = self._blocks[address] = _Block(stream, what, is_host=stream is self.host, number=number)
        known = storage._cdata
        if known not in self._addresses:
            weakref.finalize(storage, self._end, known)
        self._addresses[known] = address
        return block

    def _record(self, what: _CallSite, action: Action, after: _Clock | None = None) -> None:
        """Record ``action`` as the last operation of the current stream, which is also ``after`` those of others."""
        if self.recording is not None:
            stream, clock = self.current, dict(self.current.clock)
            _join(clock, after or {})
            self.recording.add(stream.number, clock[stream.number], clock, (what, stream), action)

    def free(self, address: int) -> None:
        """Note that the memory at ``address`` is freed. The allocator of host memory waits for copies by itself."""
        block = self._blocks.pop(address, None)
        if self.recording is not None:
            self.recording.free(address)
        if block is not None and not block.is_host:
            self._freed[block.stream.number].append(block)

    def record_stream(self, tensor: torch.Tensor, stream: SimulatedStream) -> None:
        """Note that ``tensor`` is used on ``stream``, so that its memory is not used again before that is done."""
        block = self.block_of(tensor, "record_stream")
        if block is not None:
            block.recorded.add(stream.number)

    def _end(self, storage: int) -> None:
        self.free(self._addresses.pop(storage))

    @staticmethod
    def _may_run(access: _Access, block: _Block, stream: SimulatedStream) -> bool:
        """Return whether ``access`` may come after an allocation on ``stream`` that gets the memory of ``block``."""
        number = access.stream.number
        return number != stream.number and number not in block.recorded and not access.is_before(stream.clock)

    def block_of(self, tensor: torch.Tensor, what: str, *, fills: bool = False, keeps: bool = True) -> _Block | None:
        """Return the memory of ``tensor``, allocated on the current stream if it is not known; ``None`` if empty.
        ``fills``: as for :meth:`allocate`. ``keeps``: as for :meth:`allocate`."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr() if storage.nbytes() else 0
        if not address:
            return None
        if address not in self._blocks:
            self.allocate(storage, what, fills=fills, keeps=keeps)
        return self._blocks[address]

    def _note(self, block: _Block, new: _Access) -> None:
        kept = []
        for old in block.accesses:
            conflicts = (new.is_write or old.is_write) and old.stream is not new.stream and old.overlaps(new.runs)
            is_before = old.stream is new.stream or old.is_before(new.stream.clock)
            if conflicts and not is_before:
                race = Race("write" if new.is_write else "read", str(block.what), str(old), str(new))
                self._report(race, _rule_of(old.what, new.what))
            is_covered = old.runs == new.runs and (new.is_write or (old.stream is new.stream and not old.is_write))
            if not (is_before and is_covered):
                kept.append(old)
        block.accesses = [*kept, new]

    def _report(self, race: Race, rule: str) -> None:
        if race not in self.races:
            self.races.append(race)
            if rule and self.keeps_contract:
                note_violation(rule, str(race))

    def _here(self, operation: str) -> _CallSite:
        """Return ``operation`` with the last label and the stack."""
        frames = list[tuple[CodeType, int]]()
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and len(frames) < _FRAMES:
            if _name(frame.f_code):
                frames.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        return _CallSite(operation, self.label, tuple(frames))


_CPU = torch.device("cpu")


def _rule_of(first: _CallSite, second: _CallSite) -> str:
    """Return the rule of a stand-in for NCCL that an unordered pair of accesses breaks, or an empty text."""
    if first.is_collective:
        return "wait" if first.operation.startswith(ASYNCHRONOUS) else "current stream"
    if second.is_collective:
        return "own stream" if second.operation.startswith(ASYNCHRONOUS) else "current stream"
    return ""


def _runs(tensor: torch.Tensor) -> _Runs:
    """Return the byte ranges of ``tensor`` in its storage."""
    size, begin = tensor.element_size(), int(tensor.storage_offset()) * tensor.element_size()
    if not tensor.numel():
        return ()
    dims = sorted(
        ((stride, length) for stride, length in zip(tensor.stride(), tensor.shape, strict=True) if length > 1),
        reverse=True,
    )
    inner = 1
    while dims and dims[-1][0] == inner:
        inner *= dims.pop()[1]
    starts = [0]
    for stride, length in dims:
        if len(starts) * length > _MOST_RUNS:
            span = sum(stride * (length - 1) for stride, length in zip(tensor.stride(), tensor.shape, strict=True))
            return ((begin, begin + (span + 1) * size),)
        starts = [start + stride * index for start in starts for index in range(length)]
    return tuple((begin + start * size, begin + (start + inner) * size) for start in starts)


class _Accesses(TorchDispatchMode):
    """Notes the accesses of every operation."""

    observes_sharding = True
    """The library leaves other modes during its own operations (``_core/seams.py``)."""

    def __init__(self, accelerator: SimulatedAccelerator) -> None:
        super().__init__()
        self._accelerator = accelerator
        self.copies_to_host = False
        """True while :func:`_copy_to_host` copies."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # such a tensor is dispatched again, as operations on the tensors inside it
        name = func.overloadpacket.__name__
        if name == "is_pinned":
            block = self._accelerator.block_of(args[0], name)
            return block is not None and block.is_pinned
        is_pinned = bool(kwargs.pop("pin_memory", False)) or name == "_pin_memory"
        given, is_noted = _tensors((args, kwargs)), not _is_unnoted(func, name)
        if is_noted and self._accelerator.recording is not None and not any(map(_is_fake, given)):
            for tensor in given:
                self._accelerator.block_of(tensor, name)
        call = torch.ops.aten.clone.default if name == "_pin_memory" else func
        result = call(*args, **kwargs)
        made = _tensors(result)
        if not is_noted or any(map(_is_fake, (*given, *made))):
            return result
        written = [each for value in _written_arguments(func, args, kwargs) for each in _tensors(value)]
        known = {_address(tensor) for tensor in given}
        new = [tensor for tensor in made if _address(tensor) not in known]
        writes = {id(tensor): tensor for tensor in (*written, *(() if name in _NO_WRITE else new))}
        reads = [tensor for tensor in given if id(tensor) not in writes]
        self._note(call, name, given, args, kwargs, result, reads, list(writes.values()), new, is_pinned=is_pinned)
        return result

    def _note(
        self,
        func: Any,
        name: str,
        given: Sequence[torch.Tensor],
        args: Any,
        kwargs: dict[str, Any],
        result: Any,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        new: Sequence[torch.Tensor],
        *,
        is_pinned: bool,
    ) -> None:
        """Note an operation, on the host if all its tensors are there. Wait on the host if the operation does."""
        accelerator = self._accelerator
        blocks = [block for tensor in given if (block := accelerator.block_of(tensor, name)) is not None]
        on_host = [block for block in blocks if block.is_host]
        to_host = is_pinned or self.copies_to_host
        to_device = name == "_to_copy" and (kwargs.get("device") or _CPU).index is not None
        runs_on_host = not to_device and len(on_host) == len(blocks) and (bool(blocks) or to_host)
        with accelerator.use(accelerator.host if to_host or runs_on_host else None):
            for tensor in new:
                has_gaps = tensor.nbytes < tensor.untyped_storage().nbytes()
                block = accelerator.block_of(tensor, name, fills=name in _NO_WRITE, keeps=has_gaps)
                if block is not None:
                    block.is_pinned = is_pinned
        executes = name not in _NO_WRITE and torch.Tag.inplace_view not in func.tags
        with accelerator.use(accelerator.host if runs_on_host else None):
            action = partial(Recording.call, func=func, args=args, kwargs=kwargs, result=result, written=writes)
            accelerator.access(name, reads, writes, action if executes else None)
        can_be_asynchronous = name in _COPIES and all(block.is_pinned for block in on_host)
        crosses = not runs_on_host and (bool(on_host) or to_host)
        is_asynchronous = can_be_asynchronous and bool(_argument(func, args, kwargs, "non_blocking"))
        if (crosses and not is_asynchronous) or (not runs_on_host and _returns_values(func, args)):
            accelerator.current.synchronize()


def _is_unnoted(func: Any, name: str) -> bool:
    return func.is_view or func.namespace in _NOTED_ELSEWHERE or name in _NO_ACCESS


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def _argument(func: Any, args: Sequence[Any], kwargs: dict[str, Any], name: str) -> Any:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return kwargs.get(name, args[position] if position < len(args) else None)
    return None


def _returns_values(func: Any, args: Sequence[Any]) -> bool:
    """Return whether the host gets values of tensors from ``func``, or shapes that depend on them."""
    if func.overloadpacket.__name__ in ("index", "index_put_", "index_put"):
        return any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1]))
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _tensors(values: Any) -> list[torch.Tensor]:
    tensors = [each for each in leaves(values) if isinstance(each, torch.Tensor)]
    return [each for each in tensors if not is_traceable_wrapper_subclass_type(type(each))]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _written_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield kwargs.get(argument.name, args[position] if position < len(args) else None)


class _Labels(logging.Handler):
    def __init__(self, accelerator: SimulatedAccelerator) -> None:
        super().__init__(logging.DEBUG)
        self._accelerator = accelerator

    def emit(self, record: logging.LogRecord) -> None:
        self._accelerator.label = record.getMessage()


active: list[SimulatedAccelerator] = []
"""The open accelerators, innermost last."""


@contextmanager
def simulated_accelerator(*, records: bool = False) -> Iterator[SimulatedAccelerator]:
    """Make ``torch.cpu`` an accelerator with streams inside this context, and find accesses that they do not order.

    Process groups of the backend ``"simulated_accelerator"`` communicate over gloo, on streams of their own.
    :attr:`SimulatedAccelerator.races` is empty, or lists the races.

    Args:
        records: record all operations, so that :meth:`SimulatedAccelerator.run_late` can execute them in other orders.
            Memory that is allocated and not written then is NaN.

    >>> with simulated_accelerator() as device:
    ...     x = torch.zeros(4)
    ...     side = torch.cpu.Stream()
    ...     with torch.cpu.stream(side):
    ...         y = x + 1
    >>> [race.kind for race in device.races]
    ['read']
    """
    accelerator = SimulatedAccelerator(Recording() if records else None)
    names: dict[str, Any] = {
        "Stream": partial(SimulatedStream, accelerator),
        "Event": partial(SimulatedEvent, accelerator),
        "stream": accelerator.use,
        "current_stream": lambda device=None: accelerator.current,
        "synchronize": accelerator.synchronize,
        "set_device": accelerator.set_device,
    }
    accesses = _Accesses(accelerator)
    active.append(accelerator)
    try:
        with (
            reported(),
            mock.patch.multiple(_LABELS, handlers=[_Labels(accelerator)], propagate=False, level=logging.DEBUG),
            mock.patch.object(_LABELS, "_cache", {}),
            mock.patch.multiple(torch.cpu, **names),
            mock.patch.object(torch.cpu, "is_current_stream_capturing", accelerator.is_capturing, create=True),
            mock.patch.object(torch.accelerator, "set_device_index", accelerator.set_device),
            mock.patch.object(torch.accelerator, "current_stream", names["current_stream"]),
            mock.patch.object(torch.accelerator, "synchronize", accelerator.synchronize),
            mock.patch.object(torch.UntypedStorage, "resize_", _noting_resize(accelerator)),
            mock.patch.object(torch.Tensor, "record_stream", partialmethod(_record_stream, accelerator)),
            mock.patch.object(torch.Tensor, "cpu", partialmethod(_copy_to_host, accesses)),
            mock.patch.object(torch.Tensor, "tolist", partialmethod(_read_on_host, accelerator, torch.Tensor.tolist)),
            mock.patch.object(torch.Tensor, "numpy", partialmethod(_read_on_host, accelerator, torch.Tensor.numpy)),
            accesses,
        ):
            yield accelerator
            if accelerator.recording is not None:
                accelerator.recording.finish()
    finally:
        active.remove(accelerator)


def _record_stream(tensor: torch.Tensor, accelerator: SimulatedAccelerator, stream: SimulatedStream) -> None:
    accelerator.record_stream(tensor, stream)


def _copy_to_host(tensor: torch.Tensor, accesses: _Accesses, *_: object, **__: object) -> torch.Tensor:
    """Replace ``Tensor.cpu``: copy device memory, and return host memory itself."""
    block = accesses._accelerator.block_of(tensor, "cpu") if type(tensor) is torch.Tensor else None
    if block is not None and block.is_host:
        return tensor
    accesses.copies_to_host = True
    try:
        return tensor.clone()
    finally:
        accesses.copies_to_host = False


def _read_on_host(
    tensor: torch.Tensor, accelerator: SimulatedAccelerator, read: Any, *args: object, **kwargs: object
) -> Any:
    """Replace a method of tensors that reads on the host. One on device memory waits for the current stream."""
    if not is_traceable_wrapper_subclass_type(type(tensor)) and not isinstance(tensor, FakeTensor):
        block = accelerator.block_of(tensor, read.__name__)
        is_host = block is not None and block.is_host
        with accelerator.use(accelerator.host if is_host else None):
            accelerator.access(read.__name__, [tensor], [], partial(Recording.exchange, sent=[tensor], received=[]))
            accelerator.current.synchronize()
    return read(tensor, *args, **kwargs)


def _noting_resize(accelerator: SimulatedAccelerator) -> Callable[[torch.UntypedStorage, int], torch.UntypedStorage]:
    """Return a replacement of ``UntypedStorage.resize_`` that frees and allocates."""
    resize = torch.UntypedStorage.resize_

    def noting(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        address, before = self.data_ptr() if self.nbytes() else 0, self.nbytes()
        resize(self, size)
        if before and before != size:
            accelerator.free(address)
        if size and before != size:
            accelerator.allocate(self, "resize_", fills=not before, keeps=bool(before))
        return self

    return noting
