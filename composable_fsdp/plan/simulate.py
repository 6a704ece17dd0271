"""Prediction of the time of a step from the costs of its collectives and of its computation.

The collectives of one process group run one after the other, in the order of their launch, and so do all reductions:
their stream also copies and casts. Computation runs beside them, and waits where the schedule waits.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from composable_fsdp._core.group_plan import Event, Hook
from composable_fsdp._core.state import FSDPState
from composable_fsdp.plan.dry_run import Action, Schedule
from composable_fsdp.plan.known_accelerators import Accelerator


class GroupSpec(NamedTuple):
    """The properties of one parameter group on which the time of a step depends.

    Args:
        full_bytes: the size of the full parameters in bytes, in whatever memory.
        gradient_bytes: the bytes of its gradients over all ranks.
        ranks: the number of ranks that shard it.
        replicas: the number of ranks over which it is replicated.
        separate_reduce: its reduce-scatters have a process group of their own, and run beside all-gathers.
        gather_messages: the number of messages of its all-gather. Parameters that share a message count once.
        copied_bytes: the bytes of its all-gather that are copied out of messages.
        gradient_messages: the number of messages of its reduction.
    """

    full_bytes: int = 0
    gradient_bytes: int = 0
    ranks: int = 1
    replicas: int = 1
    separate_reduce: bool = False
    gather_messages: int = 1
    copied_bytes: int = 0
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
        gather_messages=any(b.gather.packed for b in gathered) + sum(len(b.gather.zero_copy) for b in gathered),
        copied_bytes=sum(b.gather.num_shards * b.gather.packed_numel * b.compute_dtype.itemsize for b in gathered),
        gradient_messages=sum(bool(b.reduce.packed) + len(b.reduce.zero_copy) for b in plan.buckets),
    )


def simulate(
    schedule: Schedule,
    specs: Mapping[str, GroupSpec],
    accelerator: Accelerator,
    forward: Mapping[str, float],
    backward: Mapping[str, float],
) -> tuple[float, float]:
    """Return the seconds of ``schedule``, and those of them in which nothing is computed.

    Args:
        schedule: the actions of a step.
        specs: the properties of its groups, by name.
        accelerator: the device and the network, which tell the seconds of collectives and copies.
        forward: the seconds of the forward of each group's own modules in a step, without nested groups.
        backward: the same for the backward.
    """
    simulation = _Simulation(specs, accelerator)
    events = Counter((event.hook, event.group) for event, _ in schedule)

    def compute(seconds: Mapping[str, float], event: Event) -> None:
        """Compute the part of the group's ``seconds`` before ``event``: the same for each of its runs."""
        simulation.compute(seconds.get(event.group, 0.0) / events[event.hook, event.group])

    for event, actions in schedule:
        is_unseen = event.hook is Hook.POST_BACKWARD and not events[Hook.GRAD_READY, event.group]
        if is_unseen or event.hook is Hook.GRAD_READY:
            compute(backward, event)
        for action in actions:
            simulation.perform(action)
        if event.hook is Hook.PRE_FORWARD:
            compute(forward, event)
    seconds = max([simulation.now, *simulation.free_from.values()])
    return seconds, seconds - simulation.computed


class _Simulation:
    """The clocks and collectives of a simulated step.

    Attributes:
        now: the time of the device's computation.
        computed: the seconds in which it computed.
        free_from: the time from which each process group, and each stream of reductions, is free.
    """

    def __init__(self, specs: Mapping[str, GroupSpec], accelerator: Accelerator) -> None:
        self._specs, self._accelerator = specs, accelerator
        self.now = self.computed = 0.0
        self.free_from: dict[str, float] = {}
        self._arrivals: dict[str, float] = {}
        """The time at which the all-gather of each group ends."""
        self._to_copy: dict[str, list[int]] = {}
        """The bytes to copy out of the messages of each group that was not waited for. Fused groups share them."""
        self._reductions: deque[float] = deque()
        """The end of each reduction in flight."""

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.computed += seconds

    def perform(self, action: Action) -> None:
        """Perform ``action`` now."""
        specs = [self._specs[name] for name in action.groups]
        match action.verb:
            case "gather":
                self._gather(action.groups, specs)
            case "wait" | "free" | "shrink":
                (group,) = action.groups
                if action.verb == "wait":
                    self.now = max(self.now, self._arrivals.get(group, 0.0))
                if nbytes := self._to_copy.pop(group, []):
                    self.compute(self._accelerator.copy_seconds(nbytes.pop()))
            case "reduce":
                self._reduce(specs)
            case "wait for":
                for _ in range(action.number):
                    self.now = max(self.now, self._reductions.popleft())

    def _gather(self, names: Sequence[str], specs: Sequence[GroupSpec]) -> None:
        messages = _messages(spec.gather_messages for spec in specs)
        nbytes, ranks = sum(spec.full_bytes for spec in specs), specs[0].ranks
        end = self._send(("shard",), self._accelerator.collective_seconds(nbytes, ranks, messages), self.now)
        self._arrivals.update(dict.fromkeys(names, end))
        shared = [sum(spec.copied_bytes for spec in specs)]
        self._to_copy.update((name, shared) for name in names)

    def _reduce(self, specs: Sequence[GroupSpec]) -> None:
        first, nbytes = specs[0], sum(spec.gradient_bytes for spec in specs)
        self.compute(self._accelerator.copy_seconds(nbytes))
        seconds = self._accelerator.collective_seconds(
            nbytes, first.ranks, _messages(spec.gradient_messages for spec in specs)
        )
        end = self._send(("reduce", "reductions" if first.separate_reduce else "shard"), seconds, self.now)
        if first.replicas > 1:
            spread = first.ranks * first.replicas
            seconds = 2 * self._accelerator.collective_seconds(nbytes // first.ranks, first.replicas, spread=spread)
            end = self._send(("replicate",), seconds, end)
        self._reductions.append(end)

    def _send(self, wires: Sequence[str], seconds: float, ready: float) -> float:
        """Launch a collective on ``wires`` that is ready at a time. Return the time at which it ends."""
        end = max(ready, *(self.free_from.get(wire, 0.0) for wire in wires)) + seconds
        self.free_from.update(dict.fromkeys(wires, end))
        return end


def _messages(counts: Iterable[int]) -> int:
    """Return the number of messages of a fused collective: small parameters of all groups share one."""
    return 1 + sum(max(0, count - 1) for count in counts)
