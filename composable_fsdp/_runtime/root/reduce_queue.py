"""When gradients leave: which units' go together, and how many reductions are on the wire at once.

Each on the wire has its message in memory. Where the host waits there is one. On streams there are as many as have
hardly more bytes together than the largest group among them has in all: groups of one size wait for each other, while
the batches of one, and a small group after a large one, follow without waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from composable_fsdp._memory.streams import CommStreams
from composable_fsdp._runtime.groups.fused_reduce import Joiner
from composable_fsdp._runtime.groups.gradients import GroupGradients, Launch, PendingReduction, reduce_together
from composable_fsdp._runtime.groups.state import Accumulation, FSDPState
from composable_fsdp._runtime.groups.state_machine import GradientState
from composable_fsdp._runtime.root.fusion import Company
from composable_fsdp._runtime.root.prefetch import Unsharding

__all__ = ["Reductions"]

_ON_HOST = 1
"""On the wire at once, with the memory of each, where the host waits for them."""

_LEAST_BYTES = 1 << 20
"""On streams, of messages that may be on the wire at once in any case: these take their time by their number."""

_SLACK_PART = 8
"""On streams, one part in so many of the largest group's bytes may be on the wire beyond them."""


class Reductions:
    """Those of the units of one root, in the order of their launch. Each has memory until it is complete. Final.

    Args:
        states: all below the root.
        streams: where to launch.
        company: whose gradients go together.
        unsharding: what gathers units, some of them after a reduction.
    """

    def __init__(
        self, states: Collection[FSDPState], streams: CommStreams, company: Company, unsharding: Unsharding
    ) -> None:
        self._states = states
        self.streams = streams
        self._company = company
        self._unsharding = unsharding
        self._joiner = Joiner()
        self._limit: int | None = 1
        """Reductions; ``None``: by their bytes."""
        self._in_flight: deque[PendingReduction] = deque()

    def begin_backward(self) -> None:
        """What was chosen by now counts."""
        chosen = [state.reductions_in_flight for state in self._states]
        self._limit = max(filter(None, chosen), default=_ON_HOST if self.streams.block_the_host else None)

    def send_batch(self, state: FSDPState) -> None:
        """Sends the gradients of ``state``'s next batch, all of which are there."""
        self._run(state.group.gradients.take_batch(self.streams))

    def send(self, state: FSDPState, *, at_end: bool, alone: bool) -> None:
        """Does with the gradients of ``state`` what was chosen.

        Args:
            at_end: the backward is over: nobody waits for companions any more.
            alone: whether none may go with those of others.
        """
        gradients = state.group.gradients
        if state.accumulation is Accumulation.UNSHARDED:
            gradients.hold()
            return
        if alone or not self._company.reduces(state):
            self._reduce((gradients,), partial=state.keeps_partial)
            return
        together = [each.group.gradients for each in self._company.settle(state, at_end=at_end)]
        for member in together:
            if member.state is not GradientState.LOCAL:
                member.contribute()
        if together:
            self._reduce(together, partial=False)

    @property
    def are_in_flight(self) -> bool:
        """Whether some gradients have left and were not set yet."""
        return bool(self._in_flight)

    def drain(self) -> None:
        """Completes all: afterwards their gradients are set."""
        self._start()
        while self._in_flight:
            self._in_flight.popleft().complete()

    def abandon(self) -> None:
        """Forgets those that will not come to their end."""
        self._in_flight.clear()

    def _reduce(self, members: Sequence[GroupGradients], *, partial: bool) -> None:
        for launch in reduce_together(members, self.streams, self._joiner, partial=partial):
            self._run(launch)

    def _run(self, launch: Launch) -> None:
        self._make_room(launch)
        reduction = launch.run()
        self._start()
        self._in_flight.append(reduction)
        if self._unsharding.comes_after(reduction):
            self._make_room(launch)  # for a gather instead: gradients and what comes next need not meet in memory
            self._unsharding.launch_postponed()

    def _make_room(self, launch: Launch) -> None:
        """Completes the oldest ones before ``launch``, or the gather that follows it, takes memory."""
        while self._in_flight and self._is_full(launch):
            self._in_flight.popleft().complete()

    def _is_full(self, launch: Launch) -> bool:
        if self._limit is not None:
            return len(self._in_flight) >= self._limit
        there = [*(reduction.launch for reduction in self._in_flight), launch]
        most = max(_LEAST_BYTES, *(each.round_bytes for each in there))
        return sum(each.nbytes for each in there) > most + most // _SLACK_PART

    def _start(self) -> None:
        """Launches what had to wait for a first stage. One that raises, in a codec say, is gone: recovery would only
        raise again.
        """
        for _ in range(len(self._in_flight)):
            reduction = self._in_flight.popleft()
            reduction.start()
            self._in_flight.append(reduction)
