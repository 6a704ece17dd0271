"""Which units of a root are brought into memory when, ahead of their turn too, and which stay there after forward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from composable_fsdp._memory.streams import Lanes
from composable_fsdp._runtime.groups.gradients import PendingReduction
from composable_fsdp._runtime.groups.param_group import unshard_together
from composable_fsdp._runtime.groups.state import Unit, alive
from composable_fsdp._runtime.groups.state_machine import ParameterState
from composable_fsdp._runtime.params.optimizer_steps import Steps, plain_steps
from composable_fsdp._runtime.root.fusion import Company
from composable_fsdp._runtime.schedule.policy import ForwardRecord, PrefetchScheduler, batch_before_prefetch
from composable_fsdp.policies import ReshardKind

__all__ = ["Unsharding"]


class Postponed(NamedTuple):
    """Units to gather right after ``batch`` of the gradients of ``unit`` was launched."""

    unit: Unit
    batch: int
    ahead: Sequence[Unit]


class Unsharding:
    """Gathers units when they are needed, and those that the scheduler expects next. Final.

    Args:
        root: whose choices count for all.
        units: all below it, by name.
        lanes: where to launch.
        company: who is gathered with whom.
        steps: of the optimizers of their parameters.
    """

    def __init__(self, root: Unit, units: Mapping[str, Unit], lanes: Lanes, company: Company, steps: Steps) -> None:
        self._root = root
        self._units = units
        self.lanes = lanes
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
        for unit in self._units.values():
            if unit.kept_version is not None:
                self._drop_stale(unit, steps)

    @staticmethod
    def _drop_stale(kept: Unit, steps: object) -> None:
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

    def gather_by_hand(self, unit: Unit) -> bool:
        """Brings ``unit`` on its way outside of hooks, to stay there. Whether it was not there or coming before."""
        if unit.kept_version is not None and not unit.is_running:
            self._drop_stale(unit, self._steps_now)
        is_new = not unit.group.is_coming
        unit.group.unshard(self.lanes)
        if is_new:
            unit.note_kept(self._steps_now)
        elif unit.kept_version is None:
            unit.note_kept(self.seen_steps)
        return is_new

    def end_forward(self) -> None:
        """The forward ran to its end."""
        if self.is_common:
            self._scheduler.end_forward()
        for unit in self._units.values():
            if unit.group.parameter_state is ParameterState.UNSHARDING:
                unit.group.reshard()  # prefetched for a call that did not come

    def end_backward(self) -> None:
        """Autograd has come to its end, or failed: batches that only now go have nothing more to gather after them."""
        self._postponed = None

    # -- into memory

    def in_forward(self, unit: Unit) -> None:
        """Brings ``unit`` into memory, and those on their way that come after it."""
        names = self._scheduler.forward(unit.group.name) if unit.group.tensors.parameters else ()
        chosen = unit.forward_prefetch
        self._bring(unit, [self._units[name] for name in names] if chosen is None else alive(chosen), "forward")

    def in_backward(self, unit: Unit, record: ForwardRecord, position: int, *, sends_batches: bool) -> None:
        """Brings ``unit``, which ended its forward at ``position``, into memory, and on their way those before it.

        Where the host waits, these may come after a batch of ``unit``'s gradients (``batch_before_prefetch``). Whether
        they do, and whether they fit, is decided here: alike on all ranks, whatever parameters each has used. They
        follow the launch of that batch, ahead of the rest or at the end, and come before that of the next one: so the
        order of collectives is the same too. Where backward comes to another unit first, that gathers what it needs.

        Args:
            unit: to which backward has come.
            record: of the forward.
            position: in ``record``.
            sends_batches: whether ``unit``'s gradients go in batches, before backward comes to other units.
        """
        chosen = unit.backward_prefetch
        if chosen is None:
            names = self._scheduler.backward(record, position)
            following = [self._units[name] for name in names if name in self._units]
        else:
            following = alive(chosen)
        ahead = [each for each in following if each.unshard_in_backward]
        batch = self._batch_before(ahead, unit) if sends_batches and chosen is None else None
        self._bring(unit, ahead if batch is None else (), "backward")
        if batch is not None:
            fitting: list[Unit] = []
            for each in ahead:
                if self._fits(*fitting, each):
                    fitting.append(each)
            self._postponed = Postponed(unit, batch, fitting)

    def _batch_before(self, ahead: Sequence[Unit], unit: Unit) -> int | None:
        """The batch of ``unit``'s gradients after which ``ahead`` come; ``None``: they come before all.

        Where part of the group is frozen, too few gradients come to make room for. Modules of a list need not
        run one after the other.
        """
        plan = unit.group.plan
        if not self.lanes.block_the_host or unit.has_several_modules or plan.num_trainable < len(plan.specs):
            return None
        needed = sum(each.group.plan.unsharded_bytes for each in ahead)
        return batch_before_prefetch(len(plan.batches), plan.full_bytes, needed)

    def comes_after(self, reduction: PendingReduction) -> bool:
        """Whether :meth:`launch_postponed` is to follow the launch of ``reduction``."""
        postponed = self._postponed
        return postponed is not None and reduction.has(postponed.unit.group.gradients, postponed.batch)

    def launch_postponed(self) -> None:
        """Gathers what waited for a batch of gradients."""
        postponed, self._postponed = self._postponed, None
        assert postponed is not None
        for unit in postponed.ahead:
            if not unit.group.is_coming:
                self._launch(unit, "backward")

    def for_recomputation(self, unit: Unit) -> None:
        """Brings ``unit``, which computes again within backward, into memory."""
        self._bring(unit, (), "backward")

    def _bring(self, unit: Unit, ahead: Iterable[Unit], direction: str) -> None:
        """Those of ``ahead`` are launched before what is needed now arrives, unless that was on its way already: what
        arrives is in memory twice for a moment, as a message and in its place, and need not meet the next one there.
        """
        needed = (unit, *unit.lenders)
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

    def _launch_ahead(self, ahead: Iterable[Unit], direction: str) -> None:
        for unit in ahead:
            if not unit.group.is_coming and self._fits(unit):
                self._launch(unit, direction)

    def _launch(self, unit: Unit, direction: str) -> None:
        """Gathers ``unit``, along with those of its company to which this pass comes after it."""
        if not self.is_common:
            self.is_common = True
            self._company.expect(self._scheduler.expected)
        if self._each_alone:
            unit.group.unshard(self.lanes)
            return
        together = self._company.gathered_with(unit, in_backward=direction == "backward")
        label = f"all-gather of {self._company.name_of(unit)} in {direction}"
        unshard_together([each.group for each in together], self.lanes, label)

    def _fits(self, *units: Unit) -> bool:
        """Whether ``units`` may be there ahead of their turn, beside what is in memory or on its way."""
        limit = self._root.max_unsharded_bytes
        if limit is None:
            return True
        if self._each_alone:  # ranks hold different units around this one
            return False
        held = (u for u in self._units.values() if u.group.parameter_state is not ParameterState.SHARDED)
        return sum(u.group.plan.unsharded_bytes for u in {*held, *units}) <= limit

    # -- out of memory

    def after_forward(self, unit: Unit, *, leads_to_backward: bool) -> None:
        """``unit`` has computed: frees it and those of which it borrows, where that is chosen and nobody needs them."""
        for done in (unit, *unit.lenders):
            if not done.is_running and not done.is_lent:
                self._reshard(done, leads_to_backward=leads_to_backward)

    def _reshard(self, unit: Unit, *, leads_to_backward: bool) -> None:
        kind = unit.reshard.kind
        if kind is ReshardKind.AUTO:
            keep = (unit is self._root or self._comes_back_at_once(unit)) and leads_to_backward
            kind = ReshardKind.NEVER if keep else ReshardKind.ALWAYS
        if kind is ReshardKind.NEVER:
            unit.note_kept(self.seen_steps)
        elif kind is ReshardKind.SMALLER and leads_to_backward:
            unit.note_kept(self.seen_steps)
            unit.group.shrink(unit.reshard.mesh_size)
        else:
            unit.group.reshard()

    def _comes_back_at_once(self, unit: Unit) -> bool:
        """Whether backward begins with ``unit``, on a device that would have nothing to do while it is gathered anew.

        Where the host waits, it is freed like the others: the peak of memory often comes with the loss.
        """
        if self.lanes.block_the_host:
            return False
        staying = [self._units[name] for name in self._scheduler.stay(unit.name) if name in self._units]
        return bool(staying) and self._fits(*staying)
