"""Prediction of the time of a step from the costs of its collectives and of its computation.

The collectives of one process group run one after the other, in the order of their launch, and so do all reductions:
their stream also copies and casts. Computation runs beside them, and waits where the schedule waits.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from composable_fsdp._core.group_plan import Event, GroupPlan, Hook
from composable_fsdp._core.root import Root
from composable_fsdp._core.state import FSDPState
from composable_fsdp.plan.dry_run import (
    Action,
    Free,
    Gather,
    Reduce,
    Schedule,
    Shrink,
    Wait,
    WaitReduce,
    schedule_of,
)


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """The time of one kind of collective: ``latency + per_rank * (ranks - 1) + nbytes / bandwidth``.

    Args:
        latency: seconds for a message without bytes between two ranks.
        bandwidth: bytes per second that one rank sends and receives.
        per_rank: additional seconds for each further rank, as in a ring.
    """

    latency: float
    bandwidth: float
    per_rank: float = 0.0

    def seconds(self, nbytes: int, ranks: int, messages: int = 1) -> float:
        """Return the seconds for collectives whose full tensors have ``nbytes`` bytes together.

        Args:
            nbytes: the bytes of the outputs of all-gathers, or of the inputs of reductions, over all ranks.
            ranks: the number of ranks.
            messages: the number of collectives, launched one after the other.
        """
        if ranks == 1 or not nbytes:
            return 0.0
        sent = nbytes * (ranks - 1) / ranks
        return messages * (self.latency + self.per_rank * (ranks - 1)) + sent / self.bandwidth


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of the collectives of a model, and of its computation.

    Args:
        shard: the cost of an all-gather or a reduce-scatter over the shard axis.
        replicate: the same over the replicate axis. An all-reduce there takes twice as long.
        forward: seconds of the forward of each group's own modules in a step, without nested groups, by name of the
            group.
        backward: the same for the backward.
        copy_bandwidth: bytes per second at which a device copies its memory. ``None`` if copies take no time.
    """

    shard: CollectiveCost
    replicate: CollectiveCost
    forward: Mapping[str, float] = field(default_factory=dict)
    backward: Mapping[str, float] = field(default_factory=dict)
    copy_bandwidth: float | None = None

    def copy_seconds(self, nbytes: int) -> float:
        """Return the seconds for a copy of ``nbytes`` bytes in device memory."""
        return nbytes / self.copy_bandwidth if self.copy_bandwidth else 0.0


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The properties of one parameter group on which the time of a step depends.

    Args:
        full_bytes: the size of the full parameters in bytes, in whatever memory.
        gradient_bytes: the bytes of its gradients over all ranks.
        ranks: the number of ranks that shard it.
        replicas: the number of ranks over which it is replicated.
        separate_reduce: its reduce-scatters have a process group of their own, and run beside all-gathers.
        gather_messages: the number of messages of its all-gather.
        gather_copied_bytes: the bytes of its all-gather that are copied out of messages.
        gradient_messages: the number of messages of its reduction.
    """

    full_bytes: int = 0
    gradient_bytes: int = 0
    ranks: int = 1
    replicas: int = 1
    separate_reduce: bool = False
    gather_messages: int = 1
    gather_copied_bytes: int = 0
    gradient_messages: int = 1


def spec_of(state: FSDPState) -> GroupSpec:
    """Return the properties of ``state``."""
    pgs, plan = state.group.process_groups[0], state.group.plan
    gathered = [bucket for bucket in plan.buckets if bucket.is_gathered]
    return GroupSpec(
        full_bytes=plan.full_bytes,
        gradient_bytes=plan.gradient_bytes,
        ranks=pgs.axes.shard.size,
        replicas=pgs.replicate.size,
        separate_reduce=pgs.channels.has_separate_scatter,
        gather_messages=1 if pgs.gather.traits.coalesces else gather_messages(plan),
        gather_copied_bytes=sum(
            b.gather.num_shards * b.gather.packed_numel * b.compute_dtype.itemsize for b in gathered
        ),
        gradient_messages=1 if pgs.scatter.traits.coalesces else gradient_messages(plan),
    )


def gather_messages(plan: GroupPlan) -> int:
    """Return the number of transfers of one all-gather. Those that share a message count once."""
    gathers = [bucket.gather for bucket in plan.buckets if bucket.is_gathered]
    return any(each.packed for each in gathers) + sum(len(each.zero_copy) for each in gathers)


def gradient_messages(plan: GroupPlan) -> int:
    """Return the number of transfers of one reduction. Those that share a message count once."""
    return sum(bool(bucket.reduce.packed) + len(bucket.reduce.zero_copy) for bucket in plan.buckets)


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
    """The predicted times of one iteration.

    Args:
        spans: the intervals of computation and of collectives, in the order of their launch.
    """

    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """The time of the iteration."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def exposed(self) -> float:
        """The seconds in which nothing is computed."""
        return self.seconds - sum(span.end - span.begin for span in self.spans if span.stream == "compute")


def predict(root: Root, costs: Costs) -> Timeline:
    """Return the timeline of the next iteration of ``root`` that trains."""
    specs = {name: spec_of(state) for name, state in root.states.items()}
    return simulate(schedule_of(root), specs, costs)


def simulate(schedule: Schedule, specs: Mapping[str, GroupSpec], costs: Costs) -> Timeline:
    """Return the timeline of ``schedule``.

    Args:
        schedule: the actions of an iteration.
        specs: the properties of its groups, by name.
        costs: the costs of its collectives and of its computation.
    """
    simulation = _Simulation(specs, costs)
    events = Counter((event.hook, event.group) for event, _ in schedule)

    def share(seconds: Mapping[str, float], event: Event) -> float:
        """Return the part of the group's ``seconds`` before ``event``: the same for each of its runs."""
        return seconds.get(event.group, 0.0) / events[event.hook, event.group]

    for event, actions in schedule:
        is_unseen = event.hook is Hook.POST_BACKWARD and not events[Hook.GRAD_READY, event.group]
        if is_unseen or event.hook is Hook.GRAD_READY:
            simulation.compute(event, share(costs.backward, event))
        for action in actions:
            simulation.perform(action)
        if event.hook is Hook.PRE_FORWARD:
            simulation.compute(event, share(costs.forward, event))
    return Timeline(tuple(simulation.spans))


@dataclass
class _Simulation:
    """The clocks and collectives of a simulated iteration."""

    specs: Mapping[str, GroupSpec]
    costs: Costs
    now: float = 0.0
    spans: list[Span] = field(default_factory=list)
    arrivals: dict[str, float] = field(default_factory=dict)
    """The time at which the all-gather of each group ends."""
    to_copy: dict[str, list[int]] = field(default_factory=dict)
    """The bytes to copy out of the messages of each group that has not been waited for. Fused groups share them."""
    reductions: deque[float] = field(default_factory=deque)
    """The end of each reduction in flight."""
    free_from: dict[str, float] = field(default_factory=dict)
    """The time from which each process group, and each stream of reductions, is free."""

    def compute(self, label: object, seconds: float) -> None:
        """Compute for ``seconds``."""
        if seconds:
            self.spans.append(Span("compute", str(label), self.now, self.now + seconds))
            self.now += seconds

    def perform(self, action: Action) -> None:
        """Perform ``action`` now."""
        match action:
            case Gather(groups):
                self._gather(groups, str(action))
            case Wait(group):
                self.now = max(self.now, self.arrivals.get(group, 0.0))
                self._end_gather(group)
            case Free(group) | Shrink(group, _):
                self._end_gather(group)
            case Reduce(groups):
                self._reduce([self.specs[name] for name in groups], str(action))
            case WaitReduce(count):
                for _ in range(count):
                    self.now = max(self.now, self.reductions.popleft())

    def _gather(self, names: Sequence[str], label: str) -> None:
        specs = [self.specs[name] for name in names]
        count = _messages(spec.gather_messages for spec in specs)
        seconds = self.costs.shard.seconds(sum(spec.full_bytes for spec in specs), specs[0].ranks, count)
        end = self._send("gather", "shard", label, seconds, self.now)
        self.arrivals.update(dict.fromkeys(names, end))
        shared = [sum(spec.gather_copied_bytes for spec in specs)]
        self.to_copy.update((name, shared) for name in names)

    def _end_gather(self, group: str) -> None:
        """Copy the parameters out of the messages of the all-gather of ``group``."""
        messages = self.to_copy.pop(group, [])
        if messages:
            self.compute(f"copy out of gather {group}", self.costs.copy_seconds(messages.pop()))

    def _reduce(self, specs: Sequence[GroupSpec], label: str) -> None:
        first, nbytes = specs[0], sum(spec.gradient_bytes for spec in specs)
        self.compute(f"copy in of {label}", self.costs.copy_seconds(nbytes))
        count = _messages(spec.gradient_messages for spec in specs)
        group = "reductions" if first.separate_reduce else "shard"
        end = self._send("reduce", group, label, self.costs.shard.seconds(nbytes, first.ranks, count), self.now)
        if first.replicas > 1:
            seconds = 2 * self.costs.replicate.seconds(nbytes // first.ranks, first.replicas)
            end = self._send("replicate", "replicate", f"all-{label}", seconds, end)
        self.reductions.append(end)

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
