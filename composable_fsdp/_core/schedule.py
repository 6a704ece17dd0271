"""The plan of a root: what is gathered together, ahead, and kept, by position in the order of the last forward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeAlias

from composable_fsdp._core.group import ParamGroup
from composable_fsdp._core.group_plan import SMALL_BYTES, GroupPlan, Hook, ParameterState, describe_groups
from composable_fsdp._core.params import OptimizerSteps
from composable_fsdp._core.state import ForwardRecord, FSDPState, Options, alive
from composable_fsdp.policies import ReshardKind

PREFETCH_LIMIT = 1
"""The default number of prefetched groups.

Each further one costs its unsharded size. It pays where reductions take longer than the computation of the modules.
"""

DEFAULT_FUSED_BYTES = 1 << 20
"""The default maximum size of the full parameters in one fusion, in bytes."""

Fusions: TypeAlias = Mapping[str, tuple[str, ...]]
"""The groups of each fusion, by each of its groups."""

ALONE: Fusions = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """The properties of one group that a plan depends on."""

    name: str
    nbytes: int
    """The memory that unsharding takes."""
    full_bytes: int
    """The size of the full parameters, in whatever memory."""
    has_parameters: bool
    is_small: bool
    """Fused with its neighbours, if they are small too."""
    can_fuse: bool
    reshard: ReshardKind
    unshard_in_backward: bool
    forward_prefetch: tuple[str, ...] | None
    """The groups that the user chose, or ``None``."""
    backward_prefetch: tuple[str, ...] | None


Facts: TypeAlias = Mapping[str, GroupFacts]


@dataclass(frozen=True, slots=True)
class Limits:
    """The properties of a root that a plan depends on."""

    prefetch: int = PREFETCH_LIMIT
    fused_bytes: int = DEFAULT_FUSED_BYTES
    has_streams: bool = False


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """The plan of one run of a group in a pass. Each tuple of groups is one all-gather."""

    group: str
    own: tuple[str, ...]
    """The group and those that are gathered with it."""
    ahead: tuple[tuple[str, ...], ...] = ()
    """The gathers for later runs."""
    before_wait: bool = False
    """Launch ``ahead`` before the wait for the group even if it is in flight already."""
    fused: Fusions = field(default_factory=lambda: ALONE)
    keep: Fusions = field(default_factory=lambda: ALONE)
    """The groups to keep after forward, each with those that stay in memory with it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The runs of a forward and of its backward, in order."""

    forward: tuple[PlannedRun, ...] = ()
    backward: tuple[PlannedRun, ...] = ()
    fused: Fusions = field(default_factory=lambda: ALONE)


PlanChange: TypeAlias = Callable[[Plan, Facts, Limits], Plan]


def make_plan(record: ForwardRecord, facts: Facts, limits: Limits, fused: Fusions | None = None) -> Plan:
    """Return the plan of a forward like that of ``record``, and of its backward.

    The fusions are those of the forward, or ``fused`` if that has begun already.
    """
    # One gather for each run, when it begins: the plan that PLAN_CHANGES then change.
    begun = tuple(PlannedRun(event.group, (event.group,)) for event in record.events if event.hook is Hook.PRE_FORWARD)
    ended = tuple(PlannedRun(name, (name,)) for name in reversed(record.ended))
    names = dict.fromkeys(run.group for run in begun)
    plan = Plan(begun, ended, fusions(names, facts, limits.fused_bytes) if fused is None else fused)
    for change in PLAN_CHANGES:
        plan = change(plan, facts, limits)
    return plan


def fusions(order: Sequence[str] | Mapping[str, Any], facts: Facts, limit: int) -> Fusions:
    """Return the fusions of small groups that are adjacent in ``order``, up to ``limit`` bytes each."""
    runs: list[list[str]] = [[]]
    filled = 0
    for name in order:
        group = facts[name]
        if not group.has_parameters:
            continue
        size = group.full_bytes if group.is_small else limit + 1  # too large for any fusion: it ends the one before it
        if filled + size > limit:
            runs.append([])
            filled = 0
        if size <= limit:
            runs[-1].append(name)
            filled += size
    return {name: tuple(run) for run in runs if len(run) > 1 for name in run}


def gathered_with(name: str, facts: Facts, fused: Fusions, *, in_backward: bool) -> tuple[str, ...]:
    """Return ``name`` and the groups of its fusion that come after it in a pass."""
    members, own = fused.get(name), facts[name]
    if members is None or not own.can_fuse or (in_backward and not own.unshard_in_backward):
        return (name,)
    at = members.index(name)
    later = members[at::-1] if in_backward else members[at:]
    return tuple(n for n in later if facts[n].can_fuse and (facts[n].unshard_in_backward or not in_backward))


def fuse(plan: Plan, facts: Facts, limits: Limits) -> Plan:
    """Gather a small group together with those of its fusion that still come in the pass."""
    if not plan.fused:
        return plan

    def fused(runs: Sequence[PlannedRun], *, in_backward: bool) -> tuple[PlannedRun, ...]:
        # A group that does not come again in this pass is not gathered again.
        last = {run.group: at for at, run in enumerate(runs)}
        found = []
        for at, run in enumerate(runs):
            names = gathered_with(run.group, facts, plan.fused, in_backward=in_backward)
            own = tuple(name for name in names if name == run.group or last.get(name, -1) > at)
            found.append(replace(run, own=own, fused=plan.fused))
        return tuple(found)

    return replace(
        plan, forward=fused(plan.forward, in_backward=False), backward=fused(plan.backward, in_backward=True)
    )


def prefetch(plan: Plan, facts: Facts, limits: Limits) -> Plan:
    """Add to each run the gathers of the next groups of the pass, or of those that the user chose.

    A prefetch precedes the wait for the group that is needed, so that in forward on streams the network does not idle
    while that is copied out of its message. Otherwise it follows the wait, if the group was itself prefetched: a group
    that is copied is in memory twice for a moment, as message and as parameters, and should not add to the next one.
    """

    def ahead(runs: Sequence[PlannedRun], *, in_backward: bool) -> tuple[PlannedRun, ...]:
        found = []
        next_own: dict[str, tuple[str, ...]] = {}  # of each group, the gather of its next run
        targets: list[str] = []
        # From the last run backwards, so that what follows each one is known.
        for run in reversed(runs):
            own = facts[run.group]
            # The groups that the user chose, or the next ones.
            chosen = own.backward_prefetch if in_backward else own.forward_prefetch
            if chosen is None:
                others = [name for name in targets if name != own.name] if own.has_parameters else ()
                chosen = tuple(others[: limits.prefetch])
            names = [n for n in chosen if n in facts and (not in_backward or facts[n].unshard_in_backward)]
            gathers = [next_own.get(n) or gathered_with(n, facts, plan.fused, in_backward=in_backward) for n in names]
            before_wait = limits.has_streams and not in_backward
            found.append(replace(run, ahead=tuple(gathers), before_wait=before_wait))
            next_own[own.name] = run.own
            if own.has_parameters:
                targets = [own.name, *(name for name in targets if name != own.name)]
                del targets[limits.prefetch + 1 :]
        return tuple(reversed(found))

    return replace(
        plan, forward=ahead(plan.forward, in_backward=False), backward=ahead(plan.backward, in_backward=True)
    )


def keep_last(plan: Plan, facts: Facts, limits: Limits) -> Plan:
    """Keep the last groups of forward, which backward needs first.

    On streams the device would be idle while the last one is gathered again, and the network while it computes. The
    others are those that backward would prefetch at once, so they take no more memory when backward begins. Where the
    host waits, all are freed: the memory peak often comes with the loss.
    """
    if not limits.has_streams or not limits.prefetch:
        return plan
    last = [run.group for run in plan.forward if facts[run.group].has_parameters][-1 - limits.prefetch :]
    kept = [n for n in last if facts[n].reshard is ReshardKind.AUTO and facts[n].unshard_in_backward]
    keep = {name: tuple(last[last.index(name) :]) for name in kept}
    return replace(plan, forward=tuple(replace(run, keep=keep) for run in plan.forward))


PLAN_CHANGES: list[PlanChange] = [fuse, prefetch, keep_last]
"""The changes of a plan that gathers each group when it is needed, in their order."""


@dataclass(frozen=True, slots=True, eq=False)
class PlanInputs:
    """The inputs of a root's plans. Another object means that options or groups have changed."""

    facts: Facts = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    sources: tuple[tuple[FSDPState, Options, GroupPlan, bool], ...] = ()
    """The options of each state, its group's plan, and whether it shares parameters with others."""


_NO_FORWARD = ForwardRecord()
_MOST_PLANS = 16
"""The number of plans to keep: one for each order of groups and each set of facts in turn, as in accumulation."""


# Note: kept and stale
#
# A group is kept if it stays unsharded between passes: after an evaluation with reshard_after_forward=False, after
# ``unshard()``, or after a backward without reshard. ``FSDPState.kept`` has the optimizer steps and the version of the
# shards that its full parameters include. It is stale once an optimizer has stepped, a shard was written to in place,
# or ``requires_grad`` has changed; a SHRUNK one always is, and steps do not count for one that is frozen. A stale group
# is freed, and gathered anew when it is needed; a fresh one is used. The question is asked at each begin of a forward,
# and by ``unshard()``, not at the step: a step between two forwards may touch other models.


class Planner:
    """Follows the order of the groups of one root, and keeps the plans for it.

    Attributes:
        steps: the step counter of the optimizers of the root's parameters.
        steps_at_forward: their number at the last forward. Parameters kept unsharded since before a step are stale.
        record: the record of the current or last forward.
        known: by outermost module, the record of its last forward that all ranks ran: one that leads to a backward, or
            has gathered something. The newest record comes last.
        runs_on_all_ranks: True if all ranks run the current forward. Any other may run on some ranks only, so it must
            not influence later launches.
        fused: the fusions of the current or last forward that all ranks ran.
        inputs: what plans are made from, at the last call of :meth:`refresh`.
    """

    def __init__(self, root: FSDPState, states: Mapping[str, FSDPState], *, has_streams: bool) -> None:
        self._root, self.states = root, states
        self.steps = OptimizerSteps()
        self.steps_at_forward = 0
        self.record = ForwardRecord()
        self.known: dict[FSDPState, ForwardRecord] = {}
        self.runs_on_all_ranks = False
        self.fused: Fusions = ALONE
        self.inputs = PlanInputs(limits=Limits(has_streams=has_streams))
        self._plans: list[tuple[tuple[object, ...], Plan]] = []
        """The last plans with what they depend on, most recent first."""
        self._eager: dict[tuple[str, bool, bool], PlannedRun] = {}
        self._expected: deque[PlannedRun] = deque()
        """The runs that are left of the plan of the current forward."""
        self._backward: tuple[ForwardRecord | None, Sequence[PlannedRun]] = (None, ())
        """The forward that the backward last came back to, and its plan."""

    # -- the order

    def begin_forward(self, outermost: FSDPState, *, leads_to_backward: bool) -> None:
        self.steps_at_forward = self.steps.number
        self.runs_on_all_ranks = leads_to_backward
        self.refresh()
        plan = self._plan_of(self.known.get(outermost, _NO_FORWARD), None)
        self._expected = deque(plan.forward)
        if leads_to_backward:
            self.fused = plan.fused
        self.record = ForwardRecord(plan.fused)

    def next_run(self, state: FSDPState) -> PlannedRun:
        """Note that ``state`` begins a run in forward. Return its plan, an eager one if none is expected."""
        event = state.group.pre_forward_event
        self.record.events.append(event)
        for skipped, run in enumerate(self._expected):
            if run.group == event.group:
                for _ in range(skipped + 1):
                    self._expected.popleft()
                return run
        return self.eager(event.group)

    def end_forward(self, outermost: FSDPState) -> None:
        known = self.known.get(outermost, _NO_FORWARD)
        if self.runs_on_all_ranks and (self.record.ended or self.record.events != known.events):
            self.known.pop(outermost, None)
            self.known[outermost] = self.record

    @property
    def last_known(self) -> ForwardRecord:
        """The record of the last forward that all ranks ran, of whichever outermost module."""
        return next(reversed(self.known.values()), _NO_FORWARD)

    def forget(self) -> None:
        """Forget the order of groups, after a pass that failed: some ranks may have ended its forward, others not."""
        self.known, self.fused = {}, ALONE

    def begin_backward(self) -> None:
        self.refresh()
        self._backward = None, ()

    def backward_of(self, record: ForwardRecord, position: int, name: str) -> PlannedRun:
        """Return the plan of the backward of the run at ``position`` of ``record``, by the group ``name``."""
        if record.events:
            known, runs = self._backward
            if known is not record:
                runs = self._plan_of(record, record.fused).backward
                self._backward = record, runs
            if position < len(runs) and runs[-1 - position].group == name:
                return runs[-1 - position]
        return self.eager(name, in_backward=True)

    def eager(self, name: str, *, in_backward: bool = False, recomputes: bool = False) -> PlannedRun:
        """Return the plan of an unexpected run: no more is gathered ahead than the user chose.

        For one that ``recomputes``, nothing is: backward has come to this group, and its plan to what follows.
        """
        fused = self.fused
        key = name, in_backward, recomputes
        found = self._eager.get(key)
        if found is None or found.fused is not fused:
            facts = self.inputs.facts
            chosen = facts[name].backward_prefetch if in_backward else facts[name].forward_prefetch
            names = [n for n in chosen or () if n in facts and (not in_backward or facts[n].unshard_in_backward)]
            own, *ahead = (gathered_with(n, facts, fused, in_backward=in_backward) for n in (name, *names))
            found = self._eager[key] = PlannedRun(name, own, () if recomputes else tuple(ahead), fused=fused)
        return found

    # -- gathers

    def gather_of(
        self, names: tuple[str, ...], fused: Fusions, direction: str, groups: Sequence[ParamGroup] | None = None
    ) -> tuple[Sequence[ParamGroup], str]:
        """Return the groups of one gather, by default those called ``names``, and its label. Note that it gathers."""
        if groups is None:
            groups = [self.states[name].group for name in names]
        if not self.runs_on_all_ranks:
            if all(group.can_skip_unshard for group in groups):
                return (), ""
            # A forward without grad that gathers something runs on all ranks.
            self.runs_on_all_ranks, self.fused = True, self.record.fused
        return groups, _label(fused.get(names[0], names[:1]), direction)

    def fits(self, names: Sequence[str]) -> bool:
        """Return whether the groups ``names`` may be unsharded beside those that are."""
        limit = self._root.options.max_unsharded_bytes
        if limit is None:
            return True
        if self._root.options.reduced_by_observer:  # ranks hold different groups at this point
            return False
        held = {
            name: each.group.plan.unsharded_bytes for name, each in self.states.items() if each.group.unshard_started
        }
        return sum((held | {name: self.inputs.facts[name].nbytes for name in names}).values()) <= limit

    def is_stale(self, state: FSDPState) -> bool:
        """Return whether the shards of ``state``, or requires_grad, may have changed since it was kept unsharded."""
        kept = state.kept  # Note: kept and stale
        if kept is None:
            return False
        has_stepped = kept.steps != self.steps.number and not kept.is_frozen
        if state.group.parameter_state is ParameterState.SHRUNK:
            return True  # its shards are shown: a write through their .data, which torch does not count, may have come
        return has_stepped or kept.version != state.group.version or state.group.was_flipped

    @property
    def fused_for(self) -> tuple[Fusions, PlanInputs]:
        """The fusions, and what they were made from."""
        return self.fused, self.inputs

    # -- plans

    def _plan_of(self, record: ForwardRecord, fused: Fusions | None) -> Plan:
        facts, limits = self.inputs.facts, self.inputs.limits
        # Equal inputs have the same plan, the last one first.
        key = facts, limits, record.events, record.ended, fused, tuple(PLAN_CHANGES)
        for at, (known, plan) in enumerate(self._plans):
            if known[0] is key[0] and known[1:] == key[1:]:  # equal facts are identical: refresh() sees to it
                if at:
                    self._plans.insert(0, self._plans.pop(at))
                return plan
        plan = make_plan(record, facts, limits, fused)
        if fused is None:  # so that equal fusions are identical
            plans = (known for _, known in self._plans)
            same = next((known.fused for known in plans if known.fused == plan.fused), plan.fused)
            plan = replace(plan, fused=same)
        events, ended = list(record.events), list(record.ended)  # a record grows during its forward
        self._plans = [((*key[:2], events, ended, *key[4:]), plan), *self._plans[: _MOST_PLANS - 1]]
        return plan

    @property
    def is_current(self) -> bool:
        """True if no option and no plan of a group has changed since :attr:`inputs` were made."""
        for state, options, plan, shared in self.inputs.sources:
            if state.options is not options or state.group.plan is not plan or state.is_shared is not shared:
                return False
        return bool(self.inputs.sources)

    def refresh(self) -> PlanInputs:
        """Return :attr:`inputs`, after making them again if an option or the plan of a group has changed."""
        if self.is_current:
            return self.inputs
        # An option or a group has changed: read all of them.
        states, options = self.states, self._root.options
        sources = tuple((state, state.options, state.group.plan, state.is_shared) for state in states.values())
        names = {state: name for name, state in states.items()}
        fused_bytes = DEFAULT_FUSED_BYTES if options.max_fused_bytes is None else options.max_fused_bytes
        ahead = PREFETCH_LIMIT if options.prefetch_limit is None else options.prefetch_limit
        facts = {name: _facts_of(state, self._root, names, fused_bytes) for name, state in states.items()}
        known = (key[0] for key, _ in self._plans)  # so that equal facts are identical
        same = next((other for other in known if other == facts), facts)
        limits = Limits(ahead, fused_bytes, self.inputs.limits.has_streams)
        self.inputs = PlanInputs(same, limits, sources)
        self._eager.clear()
        return self.inputs


@lru_cache(maxsize=4096)
def _label(names: tuple[str, ...], direction: str) -> str:
    """Return the label of the all-gather of the groups ``names``."""
    return f"all-gather of {describe_groups(names)} in {direction}"


def _facts_of(state: FSDPState, root: FSDPState, names: Mapping[FSDPState, str], fused_bytes: int) -> GroupFacts:
    plan = state.group.plan
    is_small = plan.is_sent and plan.full_bytes <= max(SMALL_BYTES, fused_bytes // 2)
    kind = state.options.reshard.kind
    is_alone = state is root or state.options.reduced_by_observer

    def chosen(states: Sequence[Any] | None) -> tuple[str, ...] | None:
        return None if states is None else tuple(names[state] for state in alive(states) if state in names)

    return GroupFacts(
        name=state.group.name,
        nbytes=plan.unsharded_bytes,
        full_bytes=plan.full_bytes,
        has_parameters=bool(plan.specs),
        is_small=is_small and not is_alone,
        can_fuse=state.can_be_fused,
        # Where ranks run different modules, they must keep the same groups: only those that the user keeps.
        reshard=ReshardKind.ALWAYS if state.options.reduced_by_observer and kind is ReshardKind.AUTO else kind,
        unshard_in_backward=state.options.unshard_in_backward,
        forward_prefetch=chosen(state.options.forward_prefetch),
        backward_prefetch=chosen(state.options.backward_prefetch),
    )
