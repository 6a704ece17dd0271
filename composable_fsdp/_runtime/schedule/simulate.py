"""Prediction of the time and memory of a schedule from a table of costs. Pure.

The collectives of one mesh axis run one after the other, in the order of their launch. Computation runs beside them,
and waits where the schedule waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from composable_fsdp._runtime.schedule.passes import Specs
from composable_fsdp._runtime.schedule.schedule import (
    Action,
    Event,
    Free,
    Gather,
    Hook,
    Reduce,
    Schedule,
    Shrink,
    Wait,
    WaitReduce,
)

__all__ = ["CollectiveCost", "Costs", "Span", "Timeline", "simulate"]


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """The time of a collective: ``latency + per_rank * (ranks - 1) + nbytes / bandwidth``.

    Args:
        latency: seconds for a message without bytes between two ranks.
        per_rank: additional seconds for each further rank, as in a ring.
        bandwidth: bytes per second that one rank sends and receives.
        ranks: the number of ranks.
    """

    latency: float
    bandwidth: float
    ranks: int
    per_rank: float = 0.0

    def seconds(self, full_bytes: int) -> float:
        """Return the seconds for a collective whose full tensor, over all ranks, has ``full_bytes`` bytes."""
        if self.ranks == 1:
            return 0.0
        sent = full_bytes * (self.ranks - 1) / self.ranks
        return self.latency + self.per_rank * (self.ranks - 1) + sent / self.bandwidth


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of the collectives of a model and of its computation.

    Args:
        gather: of all-gathers.
        reduce: of reduce-scatters.
        forward: seconds of the forward of each group's own modules, without nested groups.
        backward: the same for the backward.
        separate_reduce: reduce-scatters have a process group of their own, and run beside all-gathers.
    """

    gather: CollectiveCost
    reduce: CollectiveCost
    forward: Mapping[str, float]
    backward: Mapping[str, float]
    separate_reduce: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of one stream (``"compute"``, ``"gather"`` or ``"reduce"``), in seconds from the first event."""

    stream: str
    label: str
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The predicted times and memory of one iteration.

    Args:
        spans: the intervals of computation and of collectives, in the order of their launch.
        memory: after each event, the bytes of unsharded parameters and of gradients in flight.
    """

    spans: tuple[Span, ...]
    memory: tuple[tuple[Event, int], ...]

    @property
    def seconds(self) -> float:
        """The time of the iteration."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def exposed(self) -> float:
        """The seconds in which nothing is computed."""
        return self.seconds - sum(span.end - span.begin for span in self.spans if span.stream == "compute")

    @property
    def peak_bytes(self) -> int:
        """The maximum of ``memory``."""
        return max((nbytes for _, nbytes in self.memory), default=0)


def simulate(schedule: Schedule, specs: Specs, costs: Costs) -> Timeline:
    """Return the timeline of ``schedule``.

    Args:
        schedule: the actions of an iteration.
        specs: the properties of its groups, by name.
        costs: the costs of its collectives and of its computation.
    """
    simulation = _Simulation(specs, costs)
    for name in schedule.initially_unsharded:
        simulation.unsharded[name] = 0.0
    ready = [event.group for event, _ in schedule if event.hook is Hook.GRAD_READY]
    memory = []
    for event, actions in schedule:
        if event.hook is Hook.GRAD_READY:
            simulation.compute(event, costs.backward.get(event.group, 0.0) / ready.count(event.group))
        elif event.hook is Hook.POST_BACKWARD and event.group not in ready:
            simulation.compute(event, costs.backward.get(event.group, 0.0))
        for action in actions:
            simulation.perform(action)
        if event.hook is Hook.PRE_FORWARD:
            simulation.compute(event, costs.forward.get(event.group, 0.0))
        memory.append((event, simulation.bytes))
    return Timeline(tuple(simulation.spans), tuple(memory))


@dataclass
class _Simulation:
    """The clocks, memory and collectives of a simulated iteration."""

    specs: Specs
    costs: Costs
    now: float = 0.0
    spans: list[Span] = field(default_factory=list)
    unsharded: dict[str, float] = field(default_factory=dict)
    """The time at which each group that is unsharded or in flight arrives."""
    reductions: deque[tuple[float, int]] = field(default_factory=deque)
    """The end and the bytes of each reduction in flight."""
    free_from: dict[str, float] = field(default_factory=dict)
    """The time from which each wire is free."""

    @property
    def bytes(self) -> int:
        """The bytes of unsharded parameters and of gradients in flight."""
        parameters = sum(self.specs[name].unsharded_bytes for name in self.unsharded if name in self.specs)
        return parameters + sum(nbytes for _, nbytes in self.reductions)

    def compute(self, event: Event, seconds: float) -> None:
        """Compute for ``seconds``."""
        if seconds:
            self.spans.append(Span("compute", str(event), self.now, self.now + seconds))
            self.now += seconds

    def perform(self, action: Action) -> None:
        """Perform ``action`` now."""
        match action:
            case Gather(groups):
                end = self._send("gather", str(action), self.costs.gather, self._bytes_of(groups))
                self.unsharded.update(dict.fromkeys(groups, end))
            case Wait(group):
                self.now = max(self.now, self.unsharded.get(group, 0.0))
            case Free(group) | Shrink(group, _):
                self.unsharded.pop(group, None)
            case Reduce(buckets):
                nbytes = sum(self.specs[each.group].gradient_bytes[each.number] for each in buckets)
                self.reductions.append((self._send("reduce", str(action), self.costs.reduce, nbytes), nbytes))
            case WaitReduce(count):
                for _ in range(count):
                    end, _ = self.reductions.popleft()
                    self.now = max(self.now, end)

    def _bytes_of(self, groups: Iterable[str]) -> int:
        return sum(self.specs[name].full_bytes for name in groups)

    def _send(self, stream: str, label: str, cost: CollectiveCost, nbytes: int) -> float:
        """Launch a collective. Return the time at which it ends."""
        wire = stream if self.costs.separate_reduce else "wire"
        begin = max(self.now, self.free_from.get(wire, 0.0))
        end = begin + (cost.seconds(nbytes) if nbytes else 0.0)
        self.free_from[wire] = end
        self.spans.append(Span(stream, label, begin, end))
        return end
