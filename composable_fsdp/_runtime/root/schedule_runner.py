"""The executor of the schedule of one root: looks up the actions of an event and performs them.

An event that the schedule does not expect next, as in a first forward or a changed order, is served eagerly: the group
is gathered, waited for, and freed after. So results never depend on the schedule. The runner decides one thing itself:
with a bound on unsharded bytes, it leaves out a prefetch that does not fit beside what is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

from composable_fsdp._layout.plan import MessageSizes
from composable_fsdp._memory.streams import CommStreams
from composable_fsdp._runtime.groups.param_group import UNSHARD_STARTED, ParamGroup, unshard_together
from composable_fsdp._runtime.groups.profiling import describe_groups
from composable_fsdp._runtime.groups.state import FSDPState, alive
from composable_fsdp._runtime.groups.state_machine import ParameterState
from composable_fsdp._runtime.params.optimizer_steps import OptimizerSteps
from composable_fsdp._runtime.root.group_spec import names_of, options_of, settings_of, spec_of
from composable_fsdp._runtime.schedule import passes
from composable_fsdp._runtime.schedule.forward_record import ForwardRecord
from composable_fsdp._runtime.schedule.passes import GroupSpec, ScheduleOptions, ScheduleSettings
from composable_fsdp._runtime.schedule.schedule import (
    Action,
    Event,
    Free,
    Gather,
    Hook,
    Keep,
    Schedule,
    Shrink,
    Wait,
)
from composable_fsdp._sharding.mesh import axis_names

__all__ = ["ScheduleRunner"]

_MOST_SCHEDULES = 16
"""The number of compiled schedules to keep: one for each combination of order, options and unsharded groups."""

_Fused: TypeAlias = Mapping[str, tuple[str, ...]]
"""The groups of each fusion, by each of its groups."""

_UNFUSED: _Fused = {}

_settings_version: Callable[[FSDPState], int] = attrgetter("settings_version")
_plan_version: Callable[[FSDPState], int] = attrgetter("group.tensors.plan_version")


class _Setup(NamedTuple):
    """The options and plans that a schedule depends on."""

    specs: Mapping[str, GroupSpec]
    options: ScheduleOptions
    foreign: Mapping[str, ref[FSDPState]]
    """The states of other roots that own tied weights or are prefetched by choice, by a name of their own."""


_Key: TypeAlias = tuple[_Setup, bool, bool, frozenset[str], _Fused, AbstractSet[int], Sequence[Event]]
"""All that a schedule depends on."""

BoundAction: TypeAlias = tuple[Callable[["ScheduleRunner", Any], None], Any]
"""A bound action: a method of the runner and its argument. It has no reference to the runner, which owns it."""


class Row(NamedTuple):
    """The bound actions of one run of a group in a pass.

    ``waits`` are groups to wait for, each with the gather to launch first if it is sharded against expectation. They
    follow ``gathers``, or precede them if ``waits_first``. ``after`` are the actions at the post-forward event;
    ``None`` for eager ones.
    """

    event: Event
    gathers: tuple[BoundAction, ...] = ()
    waits: tuple[tuple[ParamGroup, BoundAction], ...] = ()
    waits_first: bool = False
    after: tuple[BoundAction, ...] | None = None


class _Compiled:
    """A schedule with its actions bound to the groups of a root."""

    def __init__(self, forward: list[Row], backward: list[Row]) -> None:
        self.forward = forward
        self.backward = backward
        """The rows by position in the forward record."""


class ScheduleRunner:
    """Performs the schedule of the root's forwards and backwards. Final.

    Args:
        root: the state whose options apply to all.
        states: all FSDP states below the root, by name.
        streams: the streams for launches.
        steps: the step counter of the optimizers of their parameters.
    """

    def __init__(
        self, root: FSDPState, states: Mapping[str, FSDPState], streams: CommStreams, steps: OptimizerSteps
    ) -> None:
        self._root = root
        self._states = states
        self.streams = streams
        self.steps = steps
        self.seen_steps = self.steps.number
        """The step counters at the last forward. Parameters kept unsharded since before a step are stale."""
        self.runs_on_all_ranks = False
        """True if all ranks run this forward: it leads to a backward or has launched an all-gather.

        Any other forward may run on some ranks only, so it must not influence later launches.
        """
        self._unequal_use = False
        self.leads_to_backward = True
        """The grad mode of the outermost module's forward."""
        self._known = ForwardRecord()
        """The record of the last forward that all ranks ran."""
        self._version = -1
        """The version of the options and plans for which the tables below hold."""
        sizes = root.group.process_groups[0].default_message_sizes
        self.default_settings = ScheduleSettings(sizes.zero_copy, sizes.grad_buckets)
        """The settings of the transport."""
        self._chosen = self.default_settings
        self.settings = settings_of(root, self.default_settings)
        """The settings in use: those of :meth:`use`, and those that the user has set."""
        self._setup = _Setup({}, ScheduleOptions(), {})
        self._eager: dict[tuple[Hook, str, bool], Row] = {}
        self._compiled: list[tuple[_Key, _Compiled]] = []
        """The compiled schedules, most recent first."""
        self._fused: _Fused = {}
        """The fusions of the current or last forward that all ranks ran."""
        self._candidate: _Fused = {}
        """The fusions of ``_known``, which the next forward that all ranks run will use."""
        self._candidate_for: tuple[object, ...] = ()
        self._eager_fused: _Fused = {}
        """The fusions of the eager rows."""
        self._forward: _Compiled | None = None
        self._cursor = 0
        self._backward: tuple[ForwardRecord | None, Sequence[Row]] = (None, ())
        """The forward that the backward last came back to, and the rows of its schedule."""
        self.record = ForwardRecord()
        """The record of the current or last forward."""

    # -- passes

    def begin_forward(self, *, unequal_use: bool, leads_to_backward: bool) -> None:
        """Begin a forward. With ``unequal_use``, ranks may run different modules."""
        self._unequal_use, self.leads_to_backward = unequal_use, leads_to_backward
        self._cursor = 0
        self.runs_on_all_ranks = leads_to_backward
        steps = self.seen_steps = self.steps.number
        unsharded = []
        for name, state in self._states.items():
            if state.kept is not None:
                self._drop_stale(state, steps)
            if state.group.parameter_state in UNSHARD_STARTED:
                unsharded.append(name)
                state.group.tensors.registration.find_given()
        self._refresh_options()
        candidate = self._candidate_fusions()
        if leads_to_backward:
            self._fused = candidate
        self.record = ForwardRecord(candidate, frozenset(unsharded))
        known = self._known
        self._forward = self._compile(known.events, known.unseen, self.record, leads_to_backward=leads_to_backward)

    def _refresh_options(self) -> None:
        """Make the setup again if an option or the plan of a group has changed.

        Schedules are kept for earlier setups, so that accumulation, which changes an option for each microbatch,
        compiles each of them once.
        """
        if self._versions() != self._version:
            self.settings = settings_of(self._root, self._chosen)
            setup = self._new_setup()
            self._setup = next((key[0] for key, _ in self._compiled if key[0] == setup), setup)
            self._version = self._versions()
            self._eager.clear()

    def _new_setup(self) -> _Setup:
        names = names_of(self._states)
        foreign = {name: ref(state) for state, name in names.items() if name not in self._states}
        waits = not self.streams.device.has_streams
        options = options_of(self._root, self._states.values(), self.settings, host_waits=waits)
        return _Setup(self._specs_with(self.settings, {}), options, foreign)

    def _specs_with(
        self, settings: ScheduleSettings, sizes: Mapping[str, MessageSizes], *, synchronized: bool = False
    ) -> dict[str, GroupSpec]:
        """Return the specs of all groups, by name, as they are with ``sizes`` of the messages of some."""
        names = names_of(self._states)
        axes = axis_names(pgs.axes for state in names for pgs in state.group.process_groups)
        specs = {
            name: spec_of(state, self._root, names, axes, settings, sizes=sizes.get(name), synchronized=synchronized)
            for state, name in names.items()
        }
        foreign = {
            name: replace(spec, is_foreign=True, is_root=False)
            for name, spec in specs.items()
            if name not in self._states
        }
        return specs | foreign

    def use(self, settings: ScheduleSettings) -> None:
        """Use ``settings`` where the user has set nothing, and rebuild the groups that they change.

        Nothing may be in flight, and no gradients may be held. They must be the same on every rank.
        """
        self._chosen = settings
        for name, sizes in self._sizes_with(settings).items():
            self._states[name].group.use(sizes)
        self._version = -1

    @property
    def known(self) -> ForwardRecord:
        """The record of the last forward that all ranks ran."""
        return self._known

    @property
    def version(self) -> int:
        """The version of the options and plans, which are up to date afterwards."""
        self._refresh_options()
        return self._version

    def specs_for(self, settings: ScheduleSettings) -> dict[str, GroupSpec]:
        """Return the specs of all groups, by name, as they would be with ``settings`` and synchronized gradients."""
        return self._specs_with(settings, self._sizes_with(settings), synchronized=True)

    @property
    def specs(self) -> Mapping[str, GroupSpec]:
        """The current specs of all groups by name."""
        self._refresh_options()
        return self._setup.specs

    @property
    def training_options(self) -> ScheduleOptions:
        """The options of a forward that leads to a backward."""
        return self._options(leads_to_backward=True)

    def _sizes_with(self, settings: ScheduleSettings) -> dict[str, MessageSizes]:
        """Return the message sizes of all groups with ``settings``."""
        return dict.fromkeys(self._states, settings.message_sizes)

    def _versions(self) -> int:
        foreign = self._setup.foreign
        states = [*self._states.values(), *alive(tuple(foreign.values()))] if foreign else self._states.values()
        return sum(map(_settings_version, states)) + sum(map(_plan_version, states))

    def _candidate_fusions(self) -> _Fused:
        if self._candidate_for != (self._setup, self._known.events):
            self._candidate_for = self._setup, self._known.events
            self._candidate = passes.fusions(self._known.events, self._setup.specs, self._setup.options.max_fused_bytes)
        return self._candidate

    def _compile(
        self, order: list[Event], unseen: set[int], record: ForwardRecord, *, leads_to_backward: bool
    ) -> _Compiled:
        """Return the compiled schedule of an iteration whose forward has the events ``order``."""
        key: _Key = (self._setup, leads_to_backward, self._unequal_use, record.unsharded, record.fused, unseen, order)
        for at, (known, compiled) in enumerate(self._compiled):
            if known == key:
                if at:
                    self._compiled.insert(0, self._compiled.pop(at))
                return compiled
        del self._compiled[_MOST_SCHEDULES - 1 :]
        options = self._options(leads_to_backward=leads_to_backward)
        schedule = passes.build(order, self._setup.specs, options, record.unsharded, record.fused, unseen)
        compiled = self._bind(schedule, _UNFUSED if self._unequal_use else record.fused)
        if record is self.record:  # it grows if this is a backward inside its forward
            key = (*key[:5], set(unseen), list(order))
        self._compiled.insert(0, (key, compiled))
        return compiled

    def _options(self, *, leads_to_backward: bool) -> ScheduleOptions:
        return replace(self._setup.options, unequal_use=self._unequal_use, leads_to_backward=leads_to_backward)

    def will_gather(self) -> bool:
        """Return whether some group must be gathered before its modules can run."""
        steps = self.steps.number
        return any(
            not state.group.is_gathered or self._is_stale(state, steps)
            for state in self._states.values()
            if state.group.parameters
        )

    @staticmethod
    def _is_stale(kept: FSDPState, steps: int) -> bool:
        """Return whether the shards of ``kept``, or requires_grad, may have changed since it was kept unsharded."""
        then = kept.kept
        if then is None:
            return False
        is_stale = (then.steps != steps and not then.is_frozen) or then.version != kept.group.tensors.version
        return is_stale or any(parameter.was_flipped for parameter in kept.group.parameters)

    def _drop_stale(self, kept: FSDPState, steps: int) -> None:
        """Free ``kept``, which stayed unsharded, if it is stale.

        A fresh one is checked again: a forward may skip it, and an optimizer step may come before the next forward.
        """
        if self._is_stale(kept, steps):
            kept.group.reshard()
            kept.kept = None

    def unshard_explicitly(self, state: FSDPState) -> bool:
        """Launch the all-gather of ``state`` outside of hooks, to keep it. Return whether it was sharded before."""
        if not state.is_running:
            self._drop_stale(state, self.steps.number)
        is_new = not state.group.unshard_started
        state.group.unshard(self.streams)
        if is_new:
            state.note_kept(self.steps.number)
        elif state.kept is None:
            state.note_kept(self.seen_steps)
        return is_new

    def end_forward(self) -> None:
        """End the forward, which succeeded."""
        record = self.record
        if self.runs_on_all_ranks and (record.ended or record.events != self._known.events):
            self._known = record
        for state in self._states.values():
            if state.group.parameter_state is ParameterState.UNSHARDING:
                state.group.reshard()  # prefetched for a call that did not come

    def forget_order(self) -> None:
        """Forget the order of groups, after a pass that failed: some ranks may have ended its forward, others not."""
        self._known, self._fused = ForwardRecord(), {}

    def begin_backward(self) -> None:
        """Begin a backward."""
        self._refresh_options()
        self._backward = None, ()

    def expected(self, *, is_last_backward: bool, has_barriers: bool) -> Schedule:
        """Return the schedule of the next iteration that trains, or an empty one before the first forward."""
        self._refresh_options()
        options = self._options(leads_to_backward=True)
        options = replace(options, is_last_backward=is_last_backward, has_barriers=has_barriers)
        return self.built(self._setup.specs, options)

    def built(self, specs: Mapping[str, GroupSpec], options: ScheduleOptions) -> Schedule:
        """Return the schedule of the next iteration that trains, with ``specs`` of the groups and ``options``."""
        if not self._known.events:
            return Schedule(())
        kept = frozenset(
            name for name, state in self._states.items() if state.kept is not None and state.kept.is_frozen
        )
        return passes.build(self._known.events, specs, options, kept, unseen=self._known.unseen)

    # -- events

    def in_forward(self, state: FSDPState) -> Sequence[BoundAction] | None:
        """Perform the pre-forward event of ``state``. Return the ``after`` of its row."""
        event = state.group.pre_forward_event
        self.record.events.append(event)
        forward = self._forward.forward if self._forward is not None else ()
        at = self._cursor
        if at < len(forward) and forward[at].event is event:
            self._cursor = at + 1
            row = forward[at]
        else:
            row = self._resume(state, event, forward)
        self._perform(row)
        return row.after

    def _resume(self, state: FSDPState, event: Event, forward: Sequence[Row]) -> Row:
        """Return the row of an event that is not the next one: its next row, if any, else an eager one."""
        for at in range(self._cursor, len(forward)):
            if forward[at].event is event:
                self._cursor = at + 1
                return forward[at]
        return self._eager_row(state, Hook.PRE_FORWARD)

    def in_backward(self, state: FSDPState, record: ForwardRecord, position: int) -> None:
        """Perform the pre-backward event of ``state``, which is at ``position`` of ``record``."""
        self._perform(self._backward_row(state, record, position))

    def _backward_row(self, state: FSDPState, record: ForwardRecord, position: int) -> Row:
        if record.events:
            known, rows = self._backward
            if known is not record:
                rows = self._compile(record.order_of_backward(), record.unseen, record, leads_to_backward=True).backward
                self._backward = record, rows
            if position < len(rows) and rows[position].event.group == state.group.name:
                return rows[position]
        return self._eager_row(state, Hook.PRE_BACKWARD)

    def for_recomputation(self, state: FSDPState) -> None:
        """Unshard ``state`` for a recomputation inside backward."""
        row = self._eager_row(state, Hook.PRE_BACKWARD)
        self._perform(row._replace(gathers=()))

    def after_forward(self, state: FSDPState, after: Sequence[BoundAction] | None, *, leads_to_backward: bool) -> None:
        """Perform the post-forward event of ``state``: the actions ``after``, or eager ones.

        They are eager without ``after``, and in another grad mode than that of the outermost module's forward.
        """
        if after is None or leads_to_backward is not self.leads_to_backward:
            after = self._eager_row(state, Hook.POST_FORWARD, leads_to_backward=leads_to_backward).after or ()
        for act, target in after:
            act(self, target)

    # -- reductions

    @property
    def max_reductions(self) -> int | None:
        """The number of reductions in flight, or ``None`` to limit their bytes instead."""
        return self._options(leads_to_backward=True).max_reductions

    @property
    def fusions(self) -> tuple[_Fused, int]:
        """The fusions of the current or last forward that all ranks ran, and the version of options and plans."""
        return self._fused, self._version

    def fusion_of(self, state: FSDPState) -> tuple[FSDPState, ...]:
        """Return the states whose collectives are fused with those of ``state``, itself included."""
        return tuple(self._states[name] for name in self._fused.get(state.group.name, ()))

    # -- actions

    def _perform(self, row: Row) -> None:
        waits_first = row.waits_first
        if waits_first:
            for group, (act, target) in row.waits:
                if group.parameter_state not in UNSHARD_STARTED:  # the schedule expected it to be in flight
                    act(self, target)
                    waits_first = False
        if waits_first:
            for group, _ in row.waits:
                group.wait()
        for act, target in row.gathers:
            act(self, target)
        if not waits_first:
            for group, (act, target) in row.waits:
                if group.parameter_state not in UNSHARD_STARTED:
                    act(self, target)
                group.wait()

    def _gather(self, target: tuple[Sequence[ParamGroup], str]) -> None:
        groups, label = target
        if not self.runs_on_all_ranks:
            if all(group.unshard_started for group in groups):
                return
            self.runs_on_all_ranks = True
            self._fused = self.record.fused
        unshard_together(groups, self.streams, label)

    def _gather_foreign(self, target: tuple[ref[FSDPState], str]) -> None:
        known, label = target
        state = known()
        if state is not None:
            self._gather(((state.group,), label))

    def _free(self, state: FSDPState) -> None:
        if not state.is_in_use:
            state.group.reshard()

    def _keep(self, state: FSDPState) -> None:
        if not state.is_in_use:
            state.note_kept(self.seen_steps)

    def _shrink(self, target: tuple[FSDPState, int]) -> None:
        state, mesh_size = target
        if not state.is_in_use:
            state.note_kept(self.seen_steps)
            state.group.shrink(mesh_size)

    def _gather_if_it_fits(self, target: tuple[Sequence[GroupSpec], BoundAction]) -> None:
        specs, (gather, missing) = target
        if self._fits(specs):
            gather(self, missing)

    def _fits(self, specs: Sequence[GroupSpec]) -> bool:
        """Return whether the groups of ``specs`` may be unsharded beside those that are.

        Groups are also in memory against the schedule: after a changed order, or between the modules of one group.
        """
        limit = self._root.options.max_unsharded_bytes
        if limit is None:
            return True
        if self._unequal_use:  # ranks hold different groups at this point
            return False
        held = {
            name: state.group.plan.unsharded_bytes for name, state in self._states.items() if state.group.is_gathered
        }
        return sum((held | {spec.name: spec.unsharded_bytes for spec in specs}).values()) <= limit

    # -- binding

    def _bind(self, schedule: Schedule, fused: _Fused) -> _Compiled:
        """Bind the actions of ``schedule`` to the groups of the root."""
        forward: list[Row] = []
        backward: list[Row] = []
        for event, actions in schedule:
            state = self._states.get(event.group)
            if state is None:
                continue
            if event.hook is Hook.PRE_FORWARD:
                forward.append(self._row(state.group.pre_forward_event, actions, "forward", fused))
            elif event.hook is Hook.PRE_BACKWARD:
                backward.append(self._row(event, actions, "backward", fused))
            elif event.hook is Hook.POST_FORWARD:
                last = next(i for i in reversed(range(len(forward))) if forward[i].event.group == event.group)
                forward[last] = forward[last]._replace(after=tuple(map(self._after, actions)))
        return _Compiled(forward, backward[::-1])

    def _row(self, event: Event, actions: Sequence[Action], direction: str, fused: _Fused) -> Row:
        """Return the row of an event before a forward or backward."""
        waited = {action.group for action in actions if isinstance(action, Wait)}
        gathers = tuple(
            (self._prefetch_of if waited.isdisjoint(a.groups) else self._launch_of)(a, direction, fused)
            for a in actions
            if isinstance(a, Gather)
        )
        waits = tuple(self._wait_of(a, direction, fused) for a in actions if isinstance(a, Wait))
        return Row(event, gathers, waits, waits_first=bool(actions) and isinstance(actions[0], Wait))

    def _launch_of(self, action: Gather, direction: str, fused: _Fused) -> BoundAction:
        first = action.groups[0]
        where = "" if self._unequal_use else f" in {direction}"
        label = f"all-gather of {describe_groups(fused.get(first, (first,)))}{where}"
        if first in self._setup.foreign:  # the other root is fused with nothing here, and may be dropped
            return ScheduleRunner._gather_foreign, (self._setup.foreign[first], label)
        return ScheduleRunner._gather, ([self._states[name].group for name in action.groups], label)

    def _prefetch_of(self, action: Gather, direction: str, fused: _Fused) -> BoundAction:
        """Return the call for ``action`` ahead of use: with a bound on memory, only if it fits when it is performed."""
        launch = self._launch_of(action, direction, fused)
        if self._root.options.max_unsharded_bytes is None:
            return launch
        return ScheduleRunner._gather_if_it_fits, ([self._setup.specs[name] for name in action.groups], launch)

    def _wait_of(self, action: Wait, direction: str, fused: _Fused) -> tuple[ParamGroup, BoundAction]:
        """Return the group of ``action``, and the gather to launch first if it is sharded against expectation."""
        spec = self._setup.specs[action.group]
        names = passes.gathered_with(spec, self._setup.specs, fused, in_backward=direction == "backward")
        gather = self._launch_of(Gather(names), direction, fused)
        return self._state(action.group).group, gather

    def _state(self, name: str) -> FSDPState:
        """Return the state called ``name``, of this root or an owner of tied weights, which its users keep alive."""
        state = self._states[name] if name in self._states else self._setup.foreign[name]()
        assert state is not None
        return state

    def _after(self, action: Action) -> BoundAction:
        """Return the call for an action of a post-forward event."""
        if isinstance(action, Shrink):
            return ScheduleRunner._shrink, (self._state(action.group), action.mesh_size)
        assert isinstance(action, Free | Keep)
        act = ScheduleRunner._keep if isinstance(action, Keep) else ScheduleRunner._free
        return act, self._state(action.group)

    def _eager_row(self, state: FSDPState, hook: Hook, *, leads_to_backward: bool = True) -> Row:
        """Return the actions of an event of ``state`` that do not depend on other events."""
        fused = _UNFUSED if self._unequal_use else self._fused
        if self._eager_fused is not fused:
            self._eager_fused = fused
            self._eager.clear()
        key = hook, state.name, leads_to_backward
        row = self._eager.get(key)
        if row is None:
            row = self._eager[key] = self._make_eager_row(state, hook, fused, leads_to_backward=leads_to_backward)
        return row

    def _make_eager_row(self, state: FSDPState, hook: Hook, fused: _Fused, *, leads_to_backward: bool) -> Row:
        spec, event = self._setup.specs[state.name], Event(hook, state.name)
        after = passes.reshard_after_forward(spec, self._setup.specs, (), leads_to_backward=leads_to_backward)
        if hook is Hook.POST_FORWARD:
            return Row(event, after=tuple(map(self._after, after)))
        in_backward = hook is Hook.PRE_BACKWARD
        direction = "backward" if in_backward else "forward"
        row = self._row(event, passes.unshard(spec), direction, fused)
        chosen = (spec.backward_prefetch if in_backward else spec.forward_prefetch) or ()
        ahead = []
        for name in chosen:
            other = self._setup.specs.get(name)
            if other is not None and (other.unshard_in_backward or not in_backward):
                names = passes.gathered_with(other, self._setup.specs, fused, in_backward=in_backward)
                ahead.append(self._prefetch_of(Gather(names), direction, fused))
        return row._replace(gathers=tuple(ahead), waits_first=True)  # the waits gather what is missing
