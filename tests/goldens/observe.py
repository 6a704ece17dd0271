"""Observes the events and results of a case on a rank. Everything in this file runs on the ranks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from composable_fsdp import trace
from composable_fsdp.trace import Operation, TraceEvent
from tests.helpers.fuzz.programs import Program
from tests.helpers.fuzz.reference import Meshes, train

__all__ = ["PORTABLE", "Digest", "Observation", "observe_call", "observe_programs"]

PORTABLE: Mapping[str, str] = MappingProxyType({"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default"})
"""An environment in which the bits of results depend less on the processor."""


@dataclass(frozen=True)
class Digest:
    """The compared values of an :class:`Observation`: hashes, and the number and bytes of each kind of event."""

    hashes: Mapping[str, str]
    totals: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Observation:
    """The observation of one rank: a line per event and per result, and the label of each collective."""

    events: tuple[str, ...]
    labels: tuple[str, ...]
    results: tuple[str, ...]
    totals: tuple[tuple[str, int, int], ...]

    @property
    def digest(self) -> Digest:
        lines = {"events": self.events, "labels": self.labels, "results": self.results}
        return Digest({name: hash_of(each) for name, each in lines.items()}, self.totals)


def hash_of(lines: Sequence[str]) -> str:
    """Return a hash of twelve hexadecimal digits."""
    return blake2b("\n".join(lines).encode(), digest_size=6).hexdigest()


@dataclass
class _Thread:
    """The events and results of one thread."""

    events: list[TraceEvent] = field(default_factory=list)
    results: list[str] = field(default_factory=list)


class Observer:
    """A context that collects events, and the results that are passed to :meth:`note`."""

    def __init__(self) -> None:
        # The key is the thread object, because the number of a finished thread may be reused.
        self._threads: dict[threading.Thread, _Thread] = {threading.current_thread(): _Thread()}

    def __enter__(self) -> Observer:
        trace.listeners.append(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        trace.listeners.remove(self._listen)

    def _listen(self, event: TraceEvent) -> None:
        if event.operation not in (Operation.FORWARD, Operation.BACKWARD):  # marks of time, and no operation of a group
            self._mine.events.append(event)

    @property
    def _mine(self) -> _Thread:
        return self._threads.setdefault(threading.current_thread(), _Thread())

    def note(self, label: str, tensor: torch.Tensor | None) -> None:
        self._mine.results.append(f"{label}: {'none' if tensor is None else bits(tensor)}")

    def observation(self) -> Observation:
        """Return the observation. The thread that made the observer is first, and others are sorted by content."""
        own, *others = self._threads.values()
        found = [own, *sorted(others, key=lambda thread: (list(map(event_line, thread.events)), thread.results))]
        all_events = [event for thread in found for event in thread.events]
        return Observation(
            tuple(line for thread in found for line in (*map(event_line, thread.events), "-- end of thread")),
            tuple(event.group for event in all_events if event.operation is Operation.COLLECTIVE),
            tuple(line for thread in found for line in thread.results),
            totals_of(all_events),
        )


COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast")


def event_line(event: TraceEvent) -> str:
    """Return the compared values of an event as text."""
    if event.operation is Operation.COLLECTIVE:
        ranks = () if event.position is None else event.position.ranks
        return f"{kind_of(event)} {event.bytes} bytes, ranks {','.join(map(str, ranks))}"
    plain = "" if event.plain_bytes == event.bytes else f", plain {event.plain_bytes}"
    stream = f", stream {event.stream}" if event.stream else ""
    return f"{kind_of(event)} {event.group} {event.bytes} bytes{plain}{stream}"


def kind_of(event: TraceEvent) -> str:
    """Return the operation of an event. For a collective, add its kind, if its label begins with one."""
    if event.operation is Operation.COLLECTIVE:
        kind = event.group.partition(" ")[0]
        return f"collective:{kind if kind in COLLECTIVES else 'other'}"
    return str(event.operation.value)


def totals_of(events: Sequence[TraceEvent]) -> tuple[tuple[str, int, int], ...]:
    numbers, nbytes = Counter[str](), Counter[str]()
    for event in events:
        numbers[kind_of(event)] += 1
        nbytes[kind_of(event)] += event.bytes
    return tuple((kind, numbers[kind], nbytes[kind]) for kind in sorted(numbers))


@torch.no_grad()
def bits(tensor: torch.Tensor) -> str:
    """Return the dtype, the shape and a hash of the values of this rank's shard of ``tensor``."""
    local = tensor.detach()
    while isinstance(local, DTensor):
        local = local.to_local()
    if hasattr(local, "__tensor_flatten__"):
        names, _ = local.__tensor_flatten__()
        return " ".join(bits(getattr(local, name)) for name in names)
    shape = "x".join(map(str, local.shape))
    data = local.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if local.numel() else b""
    return f"{str(local.dtype).removeprefix('torch.')} {shape} {blake2b(data, digest_size=6).hexdigest()}"


# -- programs


def observe_programs(programs: Sequence[Program], *, full: bool = False) -> list[Observation | Digest]:
    """Train the programs one after the other, and return observations if ``full`` is true, otherwise digests.

    An exception of a program ends the call, because ranks may have diverged.
    """
    meshes: Meshes = {}
    found: list[Observation | Digest] = []
    for program in programs:
        with Observer() as observer:
            for run in train(program, meshes):
                if run.error:  # of a thread
                    raise RuntimeError(run.error)
                for (label, _), value in zip(run.labels, run.values, strict=True):
                    observer.note(label, value)
        seen = observer.observation()
        found.append(seen if full else seen.digest)
    return found


# -- tests


def observe_call(
    function: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object], *, full: bool
) -> tuple[Any, Observation | Digest]:
    """Call a function of a test, and return its result and the observation."""
    with Observer() as observer, noted_training(observer):
        result = function(*args, **kwargs)
    seen = observer.observation()
    return result, seen if full else seen.digest


@contextmanager
def noted_training(observer: Observer) -> Iterator[None]:
    """Note each tensor on which ``backward`` is called, and gradients and parameters after each optimizer step."""
    backward = torch.Tensor.backward

    def noting(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        observer.note("loss", self)
        backward(self, *args, **kwargs)

    def stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for number, group in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                observer.note(f"gradient {number}.{i}", parameter.grad)
                observer.note(f"parameter {number}.{i}", parameter)

    torch.Tensor.backward = noting  # type: ignore[method-assign]
    handle = register_optimizer_step_post_hook(stepped)
    try:
        yield
    finally:
        handle.remove()
        torch.Tensor.backward = backward  # type: ignore[method-assign]
