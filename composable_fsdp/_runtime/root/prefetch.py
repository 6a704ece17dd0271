"""Unsharding and prefetching of the parameter groups of one root, and resharding after forward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from composable_fsdp._memory.streams import CommStreams
from composable_fsdp._runtime.groups.gradients import PendingReduction
from composable_fsdp._runtime.groups.param_group import unshard_together
from composable_fsdp._runtime.groups.state import FSDPState, alive
from composable_fsdp._runtime.groups.state_machine import ParameterState
from composable_fsdp._runtime.params.optimizer_steps import OptimizerSteps, plain_steps
from composable_fsdp._runtime.root.fusion import Company
from composable_fsdp._runtime.schedule.policy import ForwardRecord, PrefetchScheduler, batch_before_prefetch
from composable_fsdp.policies import ReshardKind

__all__ = ["Unsharding"]


class Postponed(NamedTuple):
    """States to unshard right after the launch of ``batch`` of the gradients of ``state``."""

    state: FSDPState
    batch: int
    ahead: Sequence[FSDPState]


class Unsharding:
    """Unshards states when they are needed, and prefetches those that the scheduler expects next. Final.

    Args:
        root: the state whose options apply to all.
        states: all FSDP states below the root, by name.
        streams: the streams for launches.
        company: the fusion of groups.
        steps: the step counter of the optimizers of their parameters.
    """

    def __init__(
        self,
        root: FSDPState,
        states: Mapping[str, FSDPState],
        streams: CommStreams,
        company: Company,
        steps: OptimizerSteps,
    ) -> None:
        self._root = root
        self._states = states
        self.streams = streams
        self._company = company
        self._scheduler = PrefetchScheduler()
        self._ranks_may_differ = False
        """True if ranks may run different modules, so that no all-gather may be fused."""
        self._postponed: Postponed | None = None
        self._steps = steps
        self.seen_steps: object = self._steps_now
        """The step counters at the last forward. Parameters kept unsharded since before a step are stale."""
        self.runs_on_all_ranks = False
        """True if all ranks run this forward: it leads to a backward or has launched an all-gather.

        Any other forward may run on some ranks only, so it must not influence later launches.
        """

    # -- passes

    def begin_forward(self, *, ranks_may_differ: bool, leads_to_backward: bool) -> None:
        """Begin a forward; with ``ranks_may_differ``, one in which ranks may run different modules."""
        self._ranks_may_differ = ranks_may_differ
        self._postponed = None  # left by a backward that failed
        self._scheduler.limit = self._root.prefetch_limit
        self._scheduler.begin_forward()
        self.runs_on_all_ranks = leads_to_backward
        if leads_to_backward:
            self._company.expect(self._scheduler.expected)
        steps = self.seen_steps = self._steps_now
        for state in self._states.values():
            if state.kept_version is not None:
                self._drop_stale(state, steps)

    @staticmethod
    def _drop_stale(kept: FSDPState, steps: object) -> None:
        """Free ``kept``, which stayed unsharded, if its shards or their ``requires_grad`` may have changed since.

        A fresh one is checked again: a forward may skip it, and an optimizer step may come before the next forward.
        """
        stepped = kept.kept_steps != steps
        is_stale = (stepped and not kept.kept_frozen) or kept.kept_version != kept.group.tensors.version
        if is_stale or any(parameter.was_flipped for parameter in kept.group.parameters):
            kept.group.reshard()
            kept.kept_version = None

    @property
    def _steps_now(self) -> tuple[int, int]:
        return self._steps.number, plain_steps()

    def unshard_explicitly(self, state: FSDPState) -> bool:
        """Launch the all-gather of ``state`` outside of hooks, to keep it. Return whether it was sharded before."""
        if state.kept_version is not None and not state.is_running:
            self._drop_stale(state, self._steps_now)
        is_new = not state.group.unshard_started
        state.group.unshard(self.streams)
        if is_new:
            state.note_kept(self._steps_now)
        elif state.kept_version is None:
            state.note_kept(self.seen_steps)
        return is_new

    def end_forward(self) -> None:
        """End the forward, which succeeded."""
        if self.runs_on_all_ranks:
            self._scheduler.end_forward()
        for state in self._states.values():
            if state.group.parameter_state is ParameterState.UNSHARDING:
                state.group.reshard()  # prefetched for a call that did not come

    def end_backward(self) -> None:
        """End the backward, successful or not: batches launched from now on have nothing to prefetch after them."""
        self._postponed = None

    # -- unshard

    def in_forward(self, state: FSDPState) -> None:
        """Unshard ``state`` and prefetch the states that come after it."""
        names = self._scheduler.forward(state.group.name) if state.group.tensors.parameters else ()
        chosen = state.forward_prefetch
        self._unshard(state, [self._states[name] for name in names] if chosen is None else alive(chosen), "forward")

    def in_backward(self, state: FSDPState, record: ForwardRecord, position: int, *, sends_batches: bool) -> None:
        """Unshard ``state`` and prefetch the states that come before it in ``record``.

        Where the host waits, the prefetch may follow a batch of ``state``'s gradients (``batch_before_prefetch``).
        Whether it does, and what fits in memory, is decided here, so all ranks decide alike whatever parameters each
        has used. The prefetch follows the launch of that batch, early or at the end, and precedes that of the next
        batch. So the order of collectives is the same on all ranks. If backward reaches another state first, that state
        is unsharded when needed.

        Args:
            state: the state that backward has reached.
            record: the order of its forward.
            position: that of ``state`` in ``record``.
            sends_batches: ``state`` reduces its gradients in batches, before backward reaches other states.
        """
        chosen = state.backward_prefetch
        if chosen is None:
            names = self._scheduler.backward(record, position)
            following = [self._states[name] for name in names if name in self._states]
        else:
            following = alive(chosen)
        ahead = [each for each in following if each.unshard_in_backward]
        batch = self._batch_before(ahead, state) if sends_batches and chosen is None else None
        self._unshard(state, ahead if batch is None else (), "backward")
        if batch is not None:
            fitting: list[FSDPState] = []
            for each in ahead:
                if self._fits(*fitting, each):
                    fitting.append(each)
            self._postponed = Postponed(state, batch, fitting)

    def _batch_before(self, ahead: Sequence[FSDPState], state: FSDPState) -> int | None:
        """Return the batch of ``state``'s gradients to prefetch ``ahead`` after, or ``None`` to prefetch at once.

        It is ``None`` if part of the group is frozen, because too few gradients come to make room for. It is ``None``
        for a group of several modules, because they need not run one after the other.
        """
        plan = state.group.plan
        if not self.streams.block_the_host or state.has_several_modules or plan.num_trainable < len(plan.specs):
            return None
        needed = sum(each.group.plan.unsharded_bytes for each in ahead)
        return batch_before_prefetch(len(plan.batches), plan.full_bytes, needed)

    def comes_after(self, reduction: PendingReduction) -> bool:
        """Return whether :meth:`launch_postponed` must follow the launch of ``reduction``."""
        postponed = self._postponed
        return postponed is not None and reduction.has(postponed.state.group.gradients, postponed.batch)

    def launch_postponed(self) -> None:
        """Launch the all-gathers that waited for a batch of gradients."""
        postponed, self._postponed = self._postponed, None
        assert postponed is not None
        for state in postponed.ahead:
            if not state.group.unshard_started:
                self._launch(state, "backward")

    def for_recomputation(self, state: FSDPState) -> None:
        """Unshard ``state`` for a recomputation inside backward."""
        self._unshard(state, (), "backward")

    def _unshard(self, state: FSDPState, ahead: Iterable[FSDPState], direction: str) -> None:
        """Unshard ``state`` and the owners of its tied weights, and prefetch ``ahead``.

        The prefetch is launched before the wait, unless the all-gather was in flight already: an arriving message is in
        memory twice for a moment, as message and as parameters, and should not add to the next one.
        """
        needed = (state, *state.lenders)
        was_ahead = True
        for each in needed:
            was_ahead = was_ahead and each.group.parameter_state is not ParameterState.SHARDED
            if not each.group.unshard_started:
                self._launch(each, direction)
        if not was_ahead:
            self._launch_ahead(ahead, direction)
        for each in needed:
            each.group.wait()
        if was_ahead:
            self._launch_ahead(ahead, direction)

    def _launch_ahead(self, ahead: Iterable[FSDPState], direction: str) -> None:
        for state in ahead:
            if not state.group.unshard_started and self._fits(state):
                self._launch(state, direction)

    def _launch(self, state: FSDPState, direction: str) -> None:
        """Launch the all-gather of ``state``, fused with those of its companions that come after it in this pass."""
        if not self.runs_on_all_ranks:
            self.runs_on_all_ranks = True
            self._company.expect(self._scheduler.expected)
        if self._ranks_may_differ:
            state.group.unshard(self.streams)
            return
        together = self._company.gathered_with(state, in_backward=direction == "backward")
        label = f"all-gather of {self._company.name_of(state)} in {direction}"
        unshard_together([each.group for each in together], self.streams, label)

    def _fits(self, *states: FSDPState) -> bool:
        """Return whether ``states`` may be prefetched beside the groups that are in memory or in flight."""
        limit = self._root.max_unsharded_bytes
        if limit is None:
            return True
        if self._ranks_may_differ:  # ranks hold different groups at this point
            return False
        held = (u for u in self._states.values() if u.group.parameter_state is not ParameterState.SHARDED)
        return sum(u.group.plan.unsharded_bytes for u in {*held, *states}) <= limit

    # -- reshard

    def after_forward(self, state: FSDPState, *, leads_to_backward: bool) -> None:
        """Reshard ``state`` and the owners of its tied weights after its forward, if no other module needs them."""
        for done in (state, *state.lenders):
            if not done.is_running and not done.is_lent:
                self._reshard(done, leads_to_backward=leads_to_backward)

    def _reshard(self, state: FSDPState, *, leads_to_backward: bool) -> None:
        kind = state.reshard.kind
        if kind is ReshardKind.AUTO:
            keep = (state is self._root or self._is_first_in_backward(state)) and leads_to_backward
            kind = ReshardKind.NEVER if keep else ReshardKind.ALWAYS
        if kind is ReshardKind.NEVER:
            state.note_kept(self.seen_steps)
        elif kind is ReshardKind.SMALLER and leads_to_backward:
            state.note_kept(self.seen_steps)
            state.group.shrink(state.reshard.mesh_size)
        else:
            state.group.reshard()

    def _is_first_in_backward(self, state: FSDPState) -> bool:
        """Return whether backward begins with ``state``, on a device that would be idle while it is all-gathered again.

        Where the host waits, the state is freed like the others: the memory peak often comes with the loss.
        """
        if self.streams.block_the_host:
            return False
        staying = [self._states[name] for name in self._scheduler.stay(state.name) if name in self._states]
        return bool(staying) and self._fits(*staying)
