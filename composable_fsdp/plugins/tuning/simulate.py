"""Prediction of the time and memory of a schedule from a table of costs. Pure.

The collectives of one process group run one after the other, in the order of their launch, and so do all reductions:
their stream also copies and casts. Computation runs beside them, and waits where the schedule waits.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt

from composable_fsdp._core.events import Action, Event, Free, Gather, Hook, Reduce, Schedule, Shrink, Wait, WaitReduce
from composable_fsdp.plugins.tuning.costs import CollectiveCost, Costs
from composable_fsdp.plugins.tuning.group_spec import GradientMemory, GroupSpec, Specs

__all__ = ["Span", "Timeline", "fit_computation", "simulate"]


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of one stream, in seconds from the first event.

    ``stream`` is ``"compute"``, ``"gather"``, ``"reduce"`` or ``"replicate"``.
    """

    stream: str
    label: str
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The predicted times and memory of one iteration.

    Args:
        spans: the intervals of computation and of collectives, in the order of their launch.
        memory: after each event, the bytes of unsharded parameters, of messages, and of gradients.
        moments: the time of each entry of ``memory``.
        peaks: the most bytes at any time, also within an event, by the number of groups whose activations are held.
    """

    spans: tuple[Span, ...]
    memory: tuple[tuple[Event, int], ...]
    peaks: tuple[int, ...]
    moments: tuple[float, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The most bytes at any time."""
        return max(self.peaks)

    def excess_over(self, other: Timeline) -> int:
        """Return the bytes by which the peak can exceed that of ``other``, another schedule of the same model.

        It holds whatever activations take: only times are compared at which ``other`` holds as many of them, or more.
        """
        excess = own = others = 0
        for here, there in zip(reversed(self.peaks), reversed(other.peaks), strict=True):
            own, others = max(own, here), max(others, there)
            excess = max(excess, own - others)
        return excess

    @property
    def seconds(self) -> float:
        """The time of the iteration."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def exposed(self) -> float:
        """The seconds in which nothing is computed."""
        return self.seconds - sum(span.end - span.begin for span in self.spans if span.stream == "compute")


def simulate(schedule: Schedule, specs: Specs, costs: Costs) -> Timeline:
    """Return the timeline of ``schedule``.

    Args:
        schedule: the actions of an iteration.
        specs: the properties of its groups, by name.
        costs: the costs of its collectives and of its computation.
    """
    simulation = _Simulation(specs, costs)
    events = Counter((event.hook, event.group) for event, _ in schedule)
    last_ready = {event.group: event for event, _ in schedule if event.hook is Hook.GRAD_READY}
    memory, moments = [], []

    def share(seconds: Mapping[str, float], event: Event) -> float:
        """Return the part of the group's ``seconds`` before ``event``. A bucket counts by its gradients' bytes."""
        sizes, number = specs[event.group].gradient_bytes, events[event.hook, event.group]
        part = sizes[event.bucket] / sum(sizes) if event.hook is Hook.GRAD_READY and number > 1 else 1 / number
        return part * seconds.get(event.group, 0.0)

    for event, actions in schedule:
        simulation.hold_activations(event, is_last=last_ready.get(event.group) == event)
        is_unseen = event.hook is Hook.POST_BACKWARD and not events[Hook.GRAD_READY, event.group]
        if is_unseen or event.hook is Hook.GRAD_READY:
            simulation.compute(event, share(costs.backward, event))
        if event.hook is Hook.GRAD_READY:
            simulation.arrive(event, in_buckets=events[event.hook, event.group] > 1)
        for action in actions:
            simulation.perform(action)
        moments.append(simulation.now)
        if event.hook is Hook.PRE_FORWARD:
            simulation.compute(event, share(costs.forward, event))
        elif event.hook is Hook.PRE_BACKWARD:
            simulation.arrive_early(event.group)
        memory.append((event, simulation.held))
    return Timeline(tuple(simulation.spans), tuple(memory), tuple(simulation.peaks), tuple(moments))


_MOST_SLOWER = 16.0
"""The largest factor of :func:`fit_computation`. Estimated."""
_FIT_STEPS = 10


def fit_computation(schedule: Schedule, specs: Specs, costs: Costs, waited: float) -> Costs:
    """Return ``costs`` with so much slower computation that the simulation of ``schedule`` takes as long as its steps.

    Where waits block the host, they are also waits for the computation of other ranks, which is longer now on one rank
    and now on another, and for processors that collectives and modules share.

    Args:
        schedule: the schedule of the measured steps.
        specs: the properties of its groups.
        costs: the costs of computation in steps, and of collectives without computation.
        waited: the measured seconds of waits in a step.
    """
    seconds = sum(costs.forward.values()) + sum(costs.backward.values()) + waited
    low, high = 1.0, _MOST_SLOWER
    if simulate(schedule, specs, costs).seconds >= seconds:
        return costs
    for _ in range(_FIT_STEPS):
        middle = sqrt(low * high)
        if simulate(schedule, specs, costs.with_slower_computation(middle)).seconds < seconds:
            low = middle
        else:
            high = middle
    return costs.with_slower_computation(low)


@dataclass
class _Messages:
    """The messages of an all-gather, those to copy out, and the bytes of parameters that are allocated by that."""

    nbytes: int
    copied_bytes: int
    late_bytes: int


@dataclass
class _Simulation:
    """The clocks, memory and collectives of a simulated iteration."""

    specs: Specs
    costs: Costs
    now: float = 0.0
    spans: list[Span] = field(default_factory=list)
    unsharded: dict[str, float] = field(default_factory=dict)
    """The time at which each group that is unsharded or in flight arrives."""
    gathers: dict[str, _Messages] = field(default_factory=dict)
    """The messages of the all-gather of each group that has not been waited for. Fused groups share them."""
    early: set[str] = field(default_factory=set)
    """The groups of which gradients have arrived before those of nested groups."""
    reductions: deque[tuple[float, GradientMemory]] = field(default_factory=deque)
    """The end of each reduction in flight, and the memory of its gradients."""
    free_from: dict[str, float] = field(default_factory=dict)
    """The time from which each process group, and each stream of reductions, is free."""
    held: int = 0
    """The bytes of unsharded parameters, of messages, and of gradients."""
    peaks: list[int] = field(default_factory=lambda: [0])
    """The most bytes so far, by the number of groups whose activations are held."""
    activations: int = 0
    """The number of groups whose activations are held."""
    released: set[str] = field(default_factory=set)
    """The groups whose last gradients have arrived in the current run of their backward."""

    def allocate(self, nbytes: int, *, for_now: int = 0) -> None:
        """Count ``nbytes`` more bytes, and ``for_now`` bytes that are freed at once. A negative number frees."""
        self.held += nbytes
        self.peaks[self.activations] = max(self.peaks[self.activations], self.held + for_now)

    def hold_activations(self, event: Event, *, is_last: bool) -> None:
        """Count a group whose activations are held since ``event``, or not any more: from its last gradient on."""
        if event.hook is Hook.PRE_FORWARD and self.specs[event.group].has_parameters:
            self.activations += 1
            if len(self.peaks) == self.activations:
                self.peaks.append(0)
        elif event.hook is Hook.PRE_BACKWARD:
            self.released.discard(event.group)
        elif event.hook is Hook.POST_BACKWARD or (event.hook is Hook.GRAD_READY and is_last):
            self.activations -= event.group not in self.released
            self.released.add(event.group)

    def unshard(self, name: str, arrival: float) -> None:
        """Count the unsharded parameters of ``name``, which arrive at a time."""
        spec = self.specs.get(name)
        if name not in self.unsharded and spec is not None:
            self.allocate(spec.unsharded_bytes)
        self.unsharded[name] = arrival

    def arrive_early(self, name: str) -> None:
        """Count the gradients of ``name`` that precede the backward of nested groups."""
        early = self.specs[name].early_gradients
        if name not in self.early and early:
            self.early.add(name)
            gradients = {index: nbytes for bucket in self.specs[name].gradients for index, nbytes in bucket}
            self.allocate(sum(gradients.get(index, 0) for index in early))

    def arrive(self, event: Event, *, in_buckets: bool) -> None:
        """Count the gradients that are ready at ``event``: one bucket of the group, or all of them."""
        spec = self.specs[event.group]
        here = slice(event.bucket, event.bucket + 1) if in_buckets else slice(None)
        arrived = sum(memory.arrived for memory in spec.gradient_memory[here])
        if spec.name in self.early:
            self.early.discard(spec.name)
            arrived -= sum(n for bucket in spec.gradients[here] for index, n in bucket if index in spec.early_gradients)
        self.allocate(arrived)

    def compute(self, label: object, seconds: float) -> None:
        """Compute for ``seconds``."""
        if seconds:
            self.spans.append(Span("compute", str(label), self.now, self.now + seconds))
            self.now += seconds

    def perform(self, action: Action) -> None:
        """Perform ``action`` now."""
        match action:
            case Gather(groups):
                self._gather([self.specs[name] for name in groups], str(action))
            case Wait(group):
                self.now = max(self.now, self.unsharded.get(group, 0.0))
                self._end_gather(group)
            case Free(group) | Shrink(group, _):
                self._end_gather(group)
                if self.unsharded.pop(group, None) is not None and group in self.specs:
                    self.allocate(-self.specs[group].unsharded_bytes)
            case Reduce(buckets):
                self._reduce([(self.specs[each.group], each.number) for each in buckets], str(action))
            case WaitReduce(count):
                for _ in range(count):
                    end, memory = self.reductions.popleft()
                    self.now = max(self.now, end)
                    self.allocate(memory.sharded - memory.in_flight)

    def _gather(self, specs: Sequence[GroupSpec], label: str) -> None:
        first = specs[0]
        count = _messages(spec.gather_messages for spec in specs)
        nbytes = sum(spec.full_bytes for spec in specs)
        seconds = self._seconds("all_gather", first.axis, nbytes, first.ranks, count)
        end = self._send("gather", first.axis, label, seconds, self.now)
        copied = sum(spec.gather_copied_bytes for spec in specs)
        sent = sum(spec.gather_sent_bytes for spec in specs)
        messages = _Messages(copied + sent, copied, sum(spec.late_bytes for spec in specs))
        self.allocate(messages.nbytes - messages.late_bytes)
        for spec in specs:
            self.unshard(spec.name, end)
            self.gathers[spec.name] = messages

    def _end_gather(self, group: str) -> None:
        """Copy the parameters out of the messages of the all-gather of ``group``, and free these."""
        messages = self.gathers.pop(group, None)
        if messages is not None:
            self.compute(f"copy out of gather {group}", self.costs.copy_seconds(messages.copied_bytes))
            self.allocate(messages.late_bytes)
            self.allocate(-messages.nbytes)
            messages.nbytes = messages.copied_bytes = messages.late_bytes = 0

    def _reduce(self, buckets: Sequence[tuple[GroupSpec, int]], label: str) -> None:
        first = buckets[0][0]
        nbytes = sum(spec.gradient_bytes[number] for spec, number in buckets)
        self.compute(f"copy in of {label}", self.costs.copy_seconds(nbytes))
        memory = [spec.gradient_memory[number] for spec, number in buckets if spec.gradient_memory]
        arrived, launched, in_flight, _ = total = GradientMemory(*map(sum, zip(*memory, strict=True)))
        self.allocate(in_flight - arrived, for_now=max(0, launched - in_flight))
        count = _messages(spec.gradient_messages[number] if spec.gradient_messages else 1 for spec, number in buckets)
        group = f"{first.axis} (reductions)" if first.separate_reduce else first.axis
        seconds = self._seconds("reduce_scatter", first.axis, nbytes, first.ranks, count)
        end = self._send("reduce", group, label, seconds, self.now)
        if first.replicas > 1:
            axis, shard = first.replicate_axis, nbytes // first.ranks
            seconds = self._seconds("all_reduce", axis, shard, first.replicas)
            end = self._send("replicate", axis, f"all-{label}", seconds, end)
        self.reductions.append((end, total))

    def _seconds(self, kind: str, axis: str, nbytes: int, ranks: int, messages: int = 1) -> float:
        """Return the seconds of a collective. Without other ranks or bytes there is none."""
        if ranks == 1 or not nbytes:
            return 0.0
        cost: CollectiveCost = getattr(self.costs.axis(axis), kind)
        return cost.seconds(nbytes, ranks, messages)

    def _send(self, stream: str, group: str, label: str, seconds: float, ready: float) -> float:
        """Launch a collective of a process group that is ``ready`` at a time. Return the time at which it ends."""
        wires = [f"process group {group}", *([] if stream == "gather" else [stream])]
        begin = max(ready, *(self.free_from.get(wire, 0.0) for wire in wires))
        end = begin + seconds
        self.free_from.update(dict.fromkeys(wires, end))
        self.spans.append(Span(stream, label, begin, end))
        return end


def _messages(counts: Iterable[int]) -> int:
    """Return the number of messages of a fused collective: small parameters of all groups share one."""
    return 1 + sum(max(0, count - 1) for count in counts)
