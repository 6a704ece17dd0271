"""Timelines of training steps, recorded and predicted, as Chrome traces and as pictures.

A timeline has lanes of slices, as a profiler shows them: the passes of the model; computation, which is the rest of the
passes without waits; the all-gathers and the reductions of each group; and the waits of the host. The times are those
of the host. Where waits block it (on CPU), waits are the exposed communication. On devices with streams, slices of
collectives end where the host has made a stream wait for them: there, a profiler has the times of the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

from composable_fsdp._runtime.schedule.schedule import Hook
from composable_fsdp.plugins.tuning.simulate import Timeline as Simulated
from composable_fsdp.trace import Operation, TraceEvent

__all__ = ["Lanes", "Slice", "aligned", "performed", "predicted", "with_prediction"]

PASSES, COMPUTE, WAITS = "passes", "compute", "waits"
GATHER, REDUCE, REPLICATE = "gather", "reduce", "replicate"
LANES = (PASSES, COMPUTE, GATHER, REDUCE, REPLICATE, WAITS)
"""The lanes in the order of their display. Those of collectives and of computation are also streams of a simulation."""


@dataclass(frozen=True, slots=True)
class Slice:
    """An interval of one lane, in seconds. ``details`` are JSON values."""

    lane: str
    name: str
    begin: float
    end: float
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The length of the interval, in seconds."""
        return self.end - self.begin

    def moved(self, seconds: float) -> Slice:
        """Return a copy that is ``seconds`` later."""
        return replace(self, begin=self.begin + seconds, end=self.end + seconds)


@dataclass(frozen=True)
class Lanes:
    """The timeline of one rank, or of a simulation.

    Attributes:
        title: ``"rank 0"`` or ``"predicted"``.
        slices: those of all lanes.
        memory: the bytes of ``counted`` from a time on.
        counted: the memory that is counted.
    """

    title: str
    slices: tuple[Slice, ...]
    memory: tuple[tuple[float, int], ...] = ()
    counted: str = "unsharded parameters"

    def lane(self, name: str) -> list[Slice]:
        """Return the slices of a lane."""
        return [each for each in self.slices if each.lane == name]

    @property
    def steps(self) -> list[tuple[float, float]]:
        """The times of the training steps: from the begin of the first forward to the end of the last backward.

        Backwards without a forward between them are of one step. Forwards without a backward belong to none.
        """
        steps: list[tuple[float, float]] = []
        forward: float | None = None
        for each in self.lane(PASSES):
            if each.name.startswith("forward"):
                forward = each.begin
            elif forward is not None:
                steps.append((forward, each.end))
                forward = None
            elif steps:
                steps[-1] = steps[-1][0], each.end
        return steps

    def moved(self, seconds: float) -> Lanes:
        """Return a copy that is ``seconds`` later."""
        slices = tuple(each.moved(seconds) for each in self.slices)
        return replace(self, slices=slices, memory=tuple((moment + seconds, held) for moment, held in self.memory))

    def summary(self) -> dict[str, Any]:
        """Return the number of steps and, as medians of them, their seconds, exposed seconds, and bytes sent."""
        steps = self.steps

        def per_step(lane: str, value_of: Callable[[Slice], float]) -> float:
            own = self.lane(lane)
            sums = [sum(value_of(each) for each in own if begin <= each.begin < end) for begin, end in steps]
            return median(sums or [0])

        def sent(each: Slice) -> float:
            return float(each.details.get("bytes", 0))

        seconds = median([end - begin for begin, end in steps] or [0.0])
        exposed = per_step(WAITS, lambda each: each.seconds)
        return {
            "title": self.title,
            "steps": len(steps),
            "seconds": seconds,
            "exposed_seconds": exposed,
            "exposed_share": exposed / seconds if seconds else 0.0,
            "gathered_bytes": per_step(GATHER, sent),
            "reduced_bytes": per_step(REDUCE, sent),
            "peak_bytes": max((held for _, held in self.memory), default=0),
        }


def performed(events: Iterable[TraceEvent], title: str = "rank 0") -> Lanes:
    """Return the timeline of recorded ``events``, as a ``Recorder`` has them.

    Collectives of one lane run one after the other, so a slice begins at its launch or when the one before has ended.
    It ends when the host had waited for it. ``details`` have the bytes, the process group, its ranks, the number of the
    collective in it, and how long the host waited.
    """
    known = sorted(events, key=lambda event: event.end)
    slices = sorted([*_passes_and_computation(known), *_collectives(known)], key=lambda each: each.begin)
    held, memory = 0, list[tuple[float, int]]()
    for event in known:
        if event.operation in (Operation.ALLOCATE, Operation.FREE):
            held += event.bytes if event.operation is Operation.ALLOCATE else -event.bytes
            memory.append((event.end, held))
    lost = -min([0, *(held for _, held in memory)])  # allocated before the first recorded event
    return Lanes(title, tuple(slices), tuple((moment, held + lost) for moment, held in memory))


def _passes_and_computation(events: Sequence[TraceEvent]) -> Iterator[Slice]:
    """Yield the passes, the waits, and the computation between waits, by the group that was waited for."""
    passes = [event for event in events if event.operation in (Operation.FORWARD, Operation.BACKWARD)]
    others = deque(events)
    computed_from = 0.0
    for each in passes:
        yield Slice(PASSES, str(each), each.begin, each.end)
        computed_from, group = max(computed_from, each.begin), ""  # a pass may run within another one
        while others and others[0].end <= each.end:
            event = others.popleft()
            is_wait = event.operation in (Operation.WAIT, Operation.REDUCED)
            ends_computation = is_wait or (event.operation is Operation.RESHARD and event.group == group)
            if ends_computation and event.begin > computed_from:
                yield Slice(COMPUTE, group or "between groups", computed_from, event.begin)
            if ends_computation:
                computed_from = max(computed_from, event.end)
                group = event.group if event.operation is Operation.WAIT else "" if not is_wait else group
            if is_wait and event.end > event.begin:
                yield Slice(WAITS, str(event), event.begin, event.end)
        if each.end > computed_from:
            yield Slice(COMPUTE, group or "between groups", computed_from, each.end)
            computed_from = each.end


@dataclass
class _InFlight:
    """A collective, which may be of several groups, since its launch."""

    launch: float
    groups: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(
        default_factory=lambda: {"bytes": 0, "plain_bytes": 0, "collectives": [], "ranks": []}
    )


def _collectives(events: Sequence[TraceEvent]) -> Iterator[Slice]:
    """Yield the collectives of all lanes. Those of one launch are one slice."""
    launched: list[TraceEvent] = []
    """The collectives since the last launch of a group."""
    in_flight: dict[str, list[_InFlight]] = {GATHER: [], REDUCE: []}
    free_from = dict.fromkeys(in_flight, 0.0)
    begins = {Operation.UNSHARD: GATHER, Operation.REDUCE: REDUCE}
    ends = {Operation.WAIT: GATHER, Operation.REDUCED: REDUCE}
    for event in events:
        if event.operation is Operation.COLLECTIVE:
            launched.append(event)
        elif event.operation in begins:
            flying = in_flight[begins[event.operation]]
            own = [each.position for each in launched if each.begin >= event.begin and each.position is not None]
            launched.clear()
            if not flying or flying[-1].launch != event.begin:
                if not event.bytes and not own:  # a group without parameters. Over shared memory, nothing is sent.
                    continue
                flying.append(_InFlight(event.begin))
            flying[-1].groups.append(event.group)
            details = flying[-1].details
            details["bytes"] += event.bytes
            details["plain_bytes"] += event.plain_bytes
            details["collectives"] += [f"{each.group}/{each.connection}/{each.number}" for each in own]
            details["ranks"] = list(own[0].ranks) if own else details["ranks"]
        elif event.operation in ends:
            lane = ends[event.operation]
            for ended in [each for each in in_flight[lane] if event.group in each.groups][:1]:
                in_flight[lane].remove(ended)
                begin = max(ended.launch, min(free_from[lane], event.end))
                free_from[lane] = event.end
                ended.details["exposed_ms"] = round(1e3 * (event.end - event.begin), 4)
                ended.details["queued_ms"] = round(1e3 * (begin - ended.launch), 4)
                yield Slice(lane, f"{lane} {', '.join(ended.groups)}", begin, event.end, ended.details)
        elif event.operation is Operation.BACKWARD:
            in_flight[REDUCE].clear()  # sums that stay on this rank until a later backward


def predicted(simulated: Simulated) -> Lanes:
    """Return the timeline of a simulation, which begins at 0."""
    spans = [Slice(each.stream, each.label, each.begin, each.end) for each in simulated.spans]
    busy = sorted((each.begin, each.end) for each in spans if each.lane == COMPUTE)
    edges = [(0.0, 0.0), *busy, (simulated.seconds, simulated.seconds)]
    waits = [Slice(WAITS, "exposed", end, start) for (_, end), (start, _) in pairwise(edges) if start > end]
    events = list(zip(simulated.moments, simulated.memory, strict=True))
    middle = next((moment for moment, (event, _) in events if event.hook is Hook.END_FORWARD), 0.0)
    passes = [Slice(PASSES, "forward", 0.0, middle), Slice(PASSES, "backward", middle, simulated.seconds)]
    slices = sorted([*passes, *spans, *waits], key=lambda each: each.begin)
    memory = tuple((moment, held) for moment, (_, held) in events)
    return Lanes("predicted", tuple(slices), memory, "unsharded parameters, messages and gradients")


def with_prediction(ranks: Sequence[Lanes], simulated: Lanes | None) -> list[Lanes]:
    """Return ``ranks`` after the predicted step, if any, which begins with the last step of the first rank."""
    if simulated is None or not ranks[0].steps:
        return list(ranks)
    return [simulated.moved(ranks[0].steps[-1][0] - simulated.steps[0][0]), *ranks]


# -- several ranks


def aligned(ranks: Sequence[Lanes]) -> list[Lanes]:
    """Return the timelines of ``ranks`` by the clock of the first one.

    Clocks of hosts differ. No rank has the data of a collective before another has launched it, which bounds the
    difference to the first rank from both sides. A difference of 0 is kept if it is within the bounds.
    """
    first, *others = ranks
    return [first, *(lanes.moved(-_difference(first, lanes)) for lanes in others)]


def _difference(first: Lanes, other: Lanes) -> float:
    """Return by how many seconds the clock of ``other`` is ahead of that of ``first``."""
    here, there = _launches_and_ends(first), _launches_and_ends(other)
    shared = here.keys() & there.keys()
    least = max((there[each][0] - here[each][1] for each in shared), default=0.0)
    most = min((there[each][1] - here[each][0] for each in shared), default=0.0)
    return min(max(0.0, least), most) if least <= most else (least + most) / 2


def _launches_and_ends(lanes: Lanes) -> dict[str, tuple[float, float]]:
    return {
        f"{position} of {each.details['ranks']}": (each.begin - 1e-3 * each.details["queued_ms"], each.end)
        for each in lanes.slices
        for position in each.details.get("collectives", ())
    }
