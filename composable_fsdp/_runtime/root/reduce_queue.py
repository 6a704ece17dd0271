"""The queue of gradient reductions, which holds their memory: at most as much as ``passes.is_full`` allows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from composable_fsdp._memory.streams import CommStreams
from composable_fsdp._runtime.groups.fused_reduce import FusedBuckets
from composable_fsdp._runtime.groups.param_group_gradients import (
    PendingReduction,
    ReductionLaunch,
    reduce_together,
)
from composable_fsdp._runtime.groups.state import Accumulation, FSDPState
from composable_fsdp._runtime.groups.state_machine import LOCAL_GRADIENTS
from composable_fsdp._runtime.root.schedule_runner import ScheduleRunner
from composable_fsdp._runtime.schedule.passes import is_full

__all__ = ["ReductionQueue"]


class ReductionQueue:
    """The reductions of one root, in the order of their launch. Each holds memory until it is complete. Final.

    Args:
        streams: the streams for launches.
        runner: performs the schedule, in which all-gathers may be launched with a reduction.
    """

    def __init__(self, streams: CommStreams, runner: ScheduleRunner) -> None:
        self.streams = streams
        self._runner = runner
        self._waiting: set[FSDPState] = set()
        """States whose gradients are complete and wait for those of their fusion."""
        self._fused_buckets = FusedBuckets()
        self._fusions: dict[FSDPState, Sequence[FSDPState]] = {}
        """The fused reductions, by state. Kept because finding one takes a look at every member."""
        self._fusions_of: object = None
        """The fusions and the version of the schedule's options that ``_fusions`` belong to."""
        self._limit: int | None = 1
        """The number of reductions in flight; ``None`` limits their bytes instead."""
        self._in_flight: deque[PendingReduction] = deque()
        self._unread: list[PendingReduction] = []
        """Reductions before those in flight, which hold no buffers any more. Flags of the first block the host."""

    def begin_backward(self) -> None:
        """Read the limits that the user has set."""
        self._limit = self._runner.max_reductions
        if self._fusions_of != self._runner.fusions:
            self._fusions_of = self._runner.fusions
            self._fusions.clear()

    def reduce_grad_bucket(self, state: FSDPState) -> None:
        """Launch the reduction of the next gradient bucket of ``state``, which is complete."""
        self._run(state.group.gradients.take_grad_bucket(self.streams))

    def send(self, state: FSDPState, *, at_end: bool, alone: bool) -> None:
        """Reduce or hold the gradients of ``state``, as configured.

        Args:
            state: the owner of the gradients.
            at_end: backward is over, so do not wait for other groups.
            alone: do not fuse them with those of other groups.
        """
        gradients = state.group.gradients
        if state.accumulation is Accumulation.UNSHARDED:
            gradients.hold()
            return
        fusion, partial = self._fusions.get(state), False
        if fusion is None:
            fusion = self._find_fusion(state)
        if state in fusion and gradients.run.is_around_another:
            # More gradients may follow a backward inside this one, and a fusion would change the order of their sum.
            self._waiting.discard(state)
            self._fusions.update(dict.fromkeys(fusion, ()))
            fusion = ()
        if alone or state not in fusion:
            together, partial = [gradients], state.keeps_partial
        else:
            self._waiting.add(state)
            if not at_end and not self._waiting.issuperset(fusion):
                return
            self._waiting.difference_update(fusion)
            together = [each.group.gradients for each in fusion]
            for member in together:
                if member.state not in LOCAL_GRADIENTS:
                    member.contribute()
        for launch in reduce_together(together, self.streams, self._fused_buckets, partial=partial):
            self._run(launch)

    def reduce_held(self, states: Iterable[FSDPState]) -> None:
        """Launch the reductions of the gradients that ``states`` hold, after backward, whatever is configured."""
        if any(each.launch.partial for each in (*self._unread, *self._in_flight)):
            self.drain()  # the sums are held only then
        for state in states:
            state.group.gradients.notice()
            for launch in reduce_together([state.group.gradients], self.streams):
                self._run(launch)

    def _find_fusion(self, state: FSDPState) -> Sequence[FSDPState]:
        """Return and note the states whose reductions are fused with those of ``state`` in this backward."""
        members = self._runner.fusion_of(state)
        fusion = [each for each in members if _can_fuse(each)]
        self._fusions.update(dict.fromkeys((state, *members), fusion))
        return fusion

    def is_waiting(self, state: FSDPState) -> bool:
        """Return whether the gradients of ``state`` are complete and wait for those of its fusion."""
        return state in self._waiting

    def clear_waiting(self) -> None:
        """Forget all waiting states: backward is over or abandoned."""
        self._waiting.clear()

    @property
    def are_in_flight(self) -> bool:
        """True if reduced gradients remain to be set."""
        return bool(self._unread or self._in_flight)

    def drain(self) -> None:
        """Wait for all reductions and set their gradients."""
        self._start()
        self._in_flight.extendleft(reversed(self._unread))
        self._unread.clear()
        while self._in_flight:
            self._in_flight.popleft().complete()

    def abandon(self) -> None:
        """Forget all reductions in flight, which will not complete."""
        self._in_flight.clear()
        self._unread.clear()

    def _run(self, launch: ReductionLaunch) -> None:
        self._make_room(launch)
        pending = launch.run()
        self._start()
        self._in_flight.append(pending)

    def _make_room(self, launch: ReductionLaunch) -> None:
        """Complete the oldest reductions before ``launch`` allocates memory, without a wait of the host for flags."""
        while self._in_flight and self._is_full(launch):
            self._in_flight.popleft().complete(self._unread if self.streams.device.has_streams else None)

    def _is_full(self, launch: ReductionLaunch) -> bool:
        in_flight = [(each.launch.nbytes, each.launch.round_bytes) for each in self._in_flight]
        return is_full(in_flight, (launch.nbytes, launch.round_bytes), self._limit)

    def _start(self) -> None:
        """Launch second stages whose first stage is done.

        One that raises, for example in a codec, is dropped: recovery would only raise again.
        """
        for _ in range(len(self._in_flight)):
            reduction = self._in_flight.popleft()
            reduction.start()
            self._in_flight.append(reduction)


def _can_fuse(state: FSDPState) -> bool:
    """Return whether this backward sets the reduced gradients of ``state``, and may reduce them with others."""
    if not state.group.plan.num_trainable:
        return False
    return state.can_be_fused and state.accumulation is Accumulation.REDUCE and not state.keeps_partial
