"""Which units of a root are brought into memory when, ahead of their turn too, and which stay there after forward."""

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
    """Units to gather right after ``batch`` of the gradients of ``state`` was launched."""

    state: FSDPState
    batch: int
    ahead: Sequence[FSDPState]


class Unsharding:
    """Gathers units when they are needed, and those that the scheduler expects next. Final.

    Args:
        root: whose choices count for all.
        states: all below it, by name.
        streams: where to launch.
        company: who is gathered with whom.
        steps: of the optimizers of their parameters.
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
        self._each_alone = False
        """Whether ranks may run different units, so that none may be gathered on the way of another."""
        self._postponed: Postponed | None = None
        self._steps = steps
        self.seen_steps: object = self._steps_now
        """As of the last forward: parameters kept unsharded since before a step are stale."""
        self.is_common = False
        """Whether all ranks run this forward: it leads to a backward, or has gathered something. Any other one may be
        run by some ranks only, so it must not decide what ranks launch later.
        """

    # -- passes

    def begin_forward(self, *, each_alone: bool, leads_to_backward: bool) -> None:
        """A forward begins; with ``each_alone``, one in which ranks may run different units."""
        self._each_alone = each_alone
        self._postponed = None  # of a backward that died
        self._scheduler.limit = self._root.prefetch_limit
        self._scheduler.begin_forward()
        self.is_common = leads_to_backward
        if leads_to_backward:
            self._company.expect(self._scheduler.expected)
        steps = self.seen_steps = self._steps_now
        for state in self._states.values():
            if state.kept_version is not None:
                self._drop_stale(state, steps)

    @staticmethod
    def _drop_stale(kept: FSDPState, steps: object) -> None:
        """Frees ``kept``, which stayed unsharded, if its shards may have changed since, or were frozen or thawed.

        A fresh one stays watched: a forward may leave it out, and an optimizer step before the next.
        """
        stepped = kept.kept_steps != steps
        is_stale = (stepped and not kept.kept_frozen) or kept.kept_version != kept.group.tensors.version
        if is_stale or any(parameter.was_flipped for parameter in kept.group.parameters):
            kept.group.reshard()
            kept.kept_version = None

    @property
    def _steps_now(self) -> tuple[int, int]:
        return self._steps.number, plain_steps()

    def gather_by_hand(self, state: FSDPState) -> bool:
        """Brings ``state`` on its way outside of hooks, to stay there. Whether it was not there or coming before."""
        if state.kept_version is not None and not state.is_running:
            self._drop_stale(state, self._steps_now)
        is_new = not state.group.is_coming
        state.group.unshard(self.streams)
        if is_new:
            state.note_kept(self._steps_now)
        elif state.kept_version is None:
            state.note_kept(self.seen_steps)
        return is_new

    def end_forward(self) -> None:
        """The forward ran to its end."""
        if self.is_common:
            self._scheduler.end_forward()
        for state in self._states.values():
            if state.group.parameter_state is ParameterState.UNSHARDING:
                state.group.reshard()  # prefetched for a call that did not come

    def end_backward(self) -> None:
        """Autograd has come to its end, or failed: batches that only now go have nothing more to gather after them."""
        self._postponed = None

    # -- into memory

    def in_forward(self, state: FSDPState) -> None:
        """Brings ``state`` into memory, and those on their way that come after it."""
        names = self._scheduler.forward(state.group.name) if state.group.tensors.parameters else ()
        chosen = state.forward_prefetch
        self._bring(state, [self._states[name] for name in names] if chosen is None else alive(chosen), "forward")

    def in_backward(self, state: FSDPState, record: ForwardRecord, position: int, *, sends_batches: bool) -> None:
        """Brings ``state``, which ended its forward at ``position``, into memory, and on their way those before it.

        Where the host waits, these may come after a batch of ``state``'s gradients (``batch_before_prefetch``). Whether
        they do, and whether they fit, is decided here: alike on all ranks, whatever parameters each has used. They
        follow the launch of that batch, ahead of the rest or at the end, and come before that of the next one: so the
        order of collectives is the same too. Where backward comes to another unit first, that gathers what it needs.

        Args:
            state: to which backward has come.
            record: of the forward.
            position: in ``record``.
            sends_batches: whether ``state``'s gradients go in batches, before backward comes to other units.
        """
        chosen = state.backward_prefetch
        if chosen is None:
            names = self._scheduler.backward(record, position)
            following = [self._states[name] for name in names if name in self._states]
        else:
            following = alive(chosen)
        ahead = [each for each in following if each.unshard_in_backward]
        batch = self._batch_before(ahead, state) if sends_batches and chosen is None else None
        self._bring(state, ahead if batch is None else (), "backward")
        if batch is not None:
            fitting: list[FSDPState] = []
            for each in ahead:
                if self._fits(*fitting, each):
                    fitting.append(each)
            self._postponed = Postponed(state, batch, fitting)

    def _batch_before(self, ahead: Sequence[FSDPState], state: FSDPState) -> int | None:
        """The batch of ``state``'s gradients after which ``ahead`` come; ``None``: they come before all.

        Where part of the group is frozen, too few gradients come to make room for. Modules of a list need not
        run one after the other.
        """
        plan = state.group.plan
        if not self.streams.block_the_host or state.has_several_modules or plan.num_trainable < len(plan.specs):
            return None
        needed = sum(each.group.plan.unsharded_bytes for each in ahead)
        return batch_before_prefetch(len(plan.batches), plan.full_bytes, needed)

    def comes_after(self, reduction: PendingReduction) -> bool:
        """Whether :meth:`launch_postponed` is to follow the launch of ``reduction``."""
        postponed = self._postponed
        return postponed is not None and reduction.has(postponed.state.group.gradients, postponed.batch)

    def launch_postponed(self) -> None:
        """Gathers what waited for a batch of gradients."""
        postponed, self._postponed = self._postponed, None
        assert postponed is not None
        for state in postponed.ahead:
            if not state.group.is_coming:
                self._launch(state, "backward")

    def for_recomputation(self, state: FSDPState) -> None:
        """Brings ``state``, which computes again within backward, into memory."""
        self._bring(state, (), "backward")

    def _bring(self, state: FSDPState, ahead: Iterable[FSDPState], direction: str) -> None:
        """Those of ``ahead`` are launched before what is needed now arrives, unless that was on its way already: what
        arrives is in memory twice for a moment, as a message and in its place, and need not meet the next one there.
        """
        needed = (state, *state.lenders)
        was_ahead = True
        for each in needed:
            was_ahead = was_ahead and each.group.parameter_state is not ParameterState.SHARDED
            if not each.group.is_coming:
                self._launch(each, direction)
        if not was_ahead:
            self._launch_ahead(ahead, direction)
        for each in needed:
            each.group.wait()
        if was_ahead:
            self._launch_ahead(ahead, direction)

    def _launch_ahead(self, ahead: Iterable[FSDPState], direction: str) -> None:
        for state in ahead:
            if not state.group.is_coming and self._fits(state):
                self._launch(state, direction)

    def _launch(self, state: FSDPState, direction: str) -> None:
        """Gathers ``state``, along with those of its company to which this pass comes after it."""
        if not self.is_common:
            self.is_common = True
            self._company.expect(self._scheduler.expected)
        if self._each_alone:
            state.group.unshard(self.streams)
            return
        together = self._company.gathered_with(state, in_backward=direction == "backward")
        label = f"all-gather of {self._company.name_of(state)} in {direction}"
        unshard_together([each.group for each in together], self.streams, label)

    def _fits(self, *states: FSDPState) -> bool:
        """Whether ``states`` may be there ahead of their turn, beside what is in memory or on its way."""
        limit = self._root.max_unsharded_bytes
        if limit is None:
            return True
        if self._each_alone:  # ranks hold different units around this one
            return False
        held = (u for u in self._states.values() if u.group.parameter_state is not ParameterState.SHARDED)
        return sum(u.group.plan.unsharded_bytes for u in {*held, *states}) <= limit

    # -- out of memory

    def after_forward(self, state: FSDPState, *, leads_to_backward: bool) -> None:
        """Free ``state`` and its lenders after its forward, where that is chosen and no other module needs them."""
        for done in (state, *state.lenders):
            if not done.is_running and not done.is_lent:
                self._reshard(done, leads_to_backward=leads_to_backward)

    def _reshard(self, state: FSDPState, *, leads_to_backward: bool) -> None:
        kind = state.reshard.kind
        if kind is ReshardKind.AUTO:
            keep = (state is self._root or self._comes_back_at_once(state)) and leads_to_backward
            kind = ReshardKind.NEVER if keep else ReshardKind.ALWAYS
        if kind is ReshardKind.NEVER:
            state.note_kept(self.seen_steps)
        elif kind is ReshardKind.SMALLER and leads_to_backward:
            state.note_kept(self.seen_steps)
            state.group.shrink(state.reshard.mesh_size)
        else:
            state.group.reshard()

    def _comes_back_at_once(self, state: FSDPState) -> bool:
        """Whether backward begins with ``state``, on a device that would have nothing to do while it is gathered anew.

        Where the host waits, it is freed like the others: the peak of memory often comes with the loss.
        """
        if self.streams.block_the_host:
            return False
        staying = [self._states[name] for name in self._scheduler.stay(state.name) if name in self._states]
        return bool(staying) and self._fits(*staying)
