"""The schedule of a step, as text and by a dry run: the events of the last step, played through the root's own code.

The launcher of a dry run only notes what it is told.

A root and its calls record the events of the last step: hooks, with what they cannot look up. A dry group has the
frozen plan of a real one, its state tables, and no parameters. Observers that act on groups
(``is_replayed``) are attached to the dry root too.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn, TypeAlias, cast
from weakref import ref

import torch

from composable_fsdp._core.events import Event, GradientState, Hook, ParameterOperation, ParameterState, Pass
from composable_fsdp._core.group import ParamGroup
from composable_fsdp._core.group_plan import GroupPlan
from composable_fsdp._core.launch import ReductionLaunch
from composable_fsdp._core.root import Root
from composable_fsdp._core.seams import OBSERVERS, Observer
from composable_fsdp._core.state import BackwardWrappers, ForwardCall, ForwardRecord, FSDPState, Kept, Options, alive
from composable_fsdp.errors import MissingNameError


@dataclass(frozen=True, slots=True)
class Gather:
    """Launch one all-gather of ``groups``. Groups that are unsharded or in flight already are left out."""

    groups: tuple[str, ...]

    def __str__(self) -> str:
        return f"gather {', '.join(self.groups)}"


@dataclass(frozen=True, slots=True)
class _OnGroup:
    """An action on one group."""

    group: str

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()} {self.group}"


class Wait(_OnGroup):
    """Wait for the all-gather of ``group`` and register its unsharded parameters."""

    __slots__ = ()


class Free(_OnGroup):
    """Register the sharded parameters of ``group`` and free the unsharded ones."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Shrink:
    """Free ``group`` except for a slice from which ``mesh_size`` neighbouring ranks can gather it again."""

    group: str
    mesh_size: int

    def __str__(self) -> str:
        return f"shrink {self.group} to {self.mesh_size} ranks"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Launch one reduction of ``groups``; a partial one ends after the shard axis, and its sums are kept."""

    groups: tuple[str, ...]
    partial: bool = False

    def __str__(self) -> str:
        where = " over the shard axis" if self.partial else ""
        return f"reduce {', '.join(self.groups)}{where}"


@dataclass(frozen=True, slots=True)
class WaitReduce:
    """Complete the oldest ``count`` reductions in flight and set their gradients."""

    count: int

    def __str__(self) -> str:
        return f"wait for {self.count} reduction{'s' if self.count > 1 else ''}"


Action: TypeAlias = Gather | Wait | Free | Shrink | Reduce | WaitReduce


class Step(NamedTuple):
    """An event and the actions that it triggers, in order."""

    event: Event
    actions: tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """The actions at each event of a forward and its backward, as this rank performs them.

    Invariants: a group is waited for before its modules compute, and freed or kept after. Every group is reduced once.
    A schedule without its prefetches computes the same values. ``print`` shows it as a table.
    """

    steps: tuple[Step, ...]

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("choice", "options"):
            raise MissingNameError(f"{name} of a schedule is gone: nothing is chosen by costs. Keep what you set.")
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __len__(self) -> int:
        return len(self.steps)

    def at(self, hook: Hook) -> list[Step]:
        """Return the steps of ``hook``, in order."""
        return [step for step in self.steps if step.event.hook is hook]

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def __str__(self) -> str:
        if not self.steps:
            return "(no forward has run yet, so the order of the groups is unknown)"
        width = max(len(str(step.event)) for step in self.steps)
        return "\n".join(
            f"{step.event!s:<{width}} | {'; '.join(map(str, step.actions))}".rstrip(" |") for step in self.steps
        )


def schedule_of(root: Root) -> Schedule:
    """Return the schedule of the next step of ``root``, if it has the events of the last one and a step of optimizers.

    Before a first backward it has the forward only, and before a first forward it is empty.
    """
    events = root.tape.events if root.tape.is_whole else None
    replay = Replay(root, Snapshot.of(root, has_stepped=True, at_rest=not events))
    replay.play(events or events_of(root.plans.known, root.states))
    return Schedule(tuple(Step(event, tuple(actions)) for event, actions in replay.steps))


def events_of(record: ForwardRecord, states: Mapping[str, FSDPState]) -> list[tuple[Any, ...]]:
    """Return the events of a step with the forward of ``record``, and a backward in which all gradients arrive.

    Unlike those of a tape, they are the same on every rank, also if ranks use different parameters of their modules.
    """
    events: list[tuple[Any, ...]] = []
    order: list[tuple[bool, str, int]] = []  # the beginnings and ends of runs, with the number of the call
    positions: dict[int, int] = {}  # those in the record, of the calls to which backward comes back
    running: dict[str, list[int]] = {}
    ends = (event.group for event in record.events if event.hook is Hook.POST_FORWARD)
    ended = record.ended or [name for name in ends if states[name].group.plan.specs]  # after an evaluation
    for hook, name in record.events:
        if hook is Hook.PRE_FORWARD:
            running.setdefault(name, []).append(len(events))
            order.append((True, name, len(events)))
            events.append(("pre_forward", name, len(events), True))
            continue
        number, position = running[name].pop(), len(positions)
        first, *others = states[name].module_ids
        comes_back = position < len(ended) and ended[position] == name
        events.append(("post_forward", number, first, True))
        for module_id in others:  # modules of the same run
            events += [("pre_forward", name, len(events), True), ("post_forward", len(events), module_id, True)]
        order.append((False, name, number))
        if comes_back:
            positions[number] = position
            events.append(("end_unseen" if position in record.unseen else "await_inputs", number))
    runs = Counter(name for begins, name, number in order if begins and number in positions)
    left = runs.copy()
    for begins, name, number in reversed(order):
        if number not in positions:
            continue
        plan, early = states[name].group.plan, states[name].params_after_nested
        trainable = {index for index, spec in enumerate(plan.specs) if spec.trainable}
        is_early = bool(trainable) and trainable <= set(early) and runs[name] == 1
        left[name] -= begins
        if not begins:
            events.append(("pre_backward", number, 0))
        if trainable and (not begins if is_early else begins and not left[name]):
            events.append(("gradient_ready", name, 0))
        if begins and positions[number] not in record.unseen:
            events.append(("post_backward", number, False, 0))
    return [*events, ("end_backward", ())] if positions else events


@dataclass(frozen=True)
class GroupSnapshot:
    """The state of one group between passes."""

    options: Options
    plan: GroupPlan
    parameters: ParameterState = ParameterState.SHARDED
    gradients: GradientState = GradientState.NONE
    were_summed: bool = False
    has_partial: bool = False
    is_kept: bool = False
    is_frozen: bool = False
    is_stale: bool = False
    was_flipped: bool = False
    runs: int = 0


@dataclass(frozen=True)
class Snapshot:
    """All that a pass of a root depends on when it begins, beside its events."""

    groups: Mapping[str, GroupSnapshot]
    known: ForwardRecord
    fused: Mapping[str, tuple[str, ...]]
    dissolved: Sequence[str]
    """The groups whose fusion was given up."""
    are_in_flight: bool
    waits_after_backward: bool

    @classmethod
    def of(cls, root: Root, *, has_stepped: bool = False, at_rest: bool = False) -> Snapshot:
        """Return the snapshot of ``root`` now, or with ``has_stepped`` after another step of its optimizers.

        With ``at_rest``, all groups are sharded, without gradients: the same on every rank.
        """
        groups = {}
        for name, state in root.states.items():
            group, kept = state.group, state.kept
            groups[name] = GroupSnapshot(state.options, state.group.plan)
            if not at_rest:
                has_changed = has_stepped and kept is not None and not kept.is_frozen
                groups[name] = replace(
                    groups[name],
                    parameters=state.group.parameter_state,
                    gradients=group.gradient_state,
                    were_summed=group.were_summed,
                    has_partial=group.has_partial,
                    is_kept=kept is not None,
                    is_frozen=kept is not None and kept.is_frozen,
                    is_stale=has_changed or root.plans.is_stale(state),
                    was_flipped=state.group.was_flipped,
                    runs=state.runs,
                )
        plans, waits = root.plans, root.waits_after_backward
        dissolved = [] if at_rest else [state.name for state in root.queue.dissolved]
        are_in_flight = root.queue.are_in_flight and not at_rest
        return cls(groups, plans.known, plans.fused, dissolved, are_in_flight, waits)


class Replay:
    """A root like ``real``, without tensors, on which events are played. ``steps`` are the actions of each hook."""

    def __init__(self, real: Root, start: Snapshot) -> None:
        self.steps: list[tuple[Event, list[Action]]] = []
        self._copies = {state: copy.copy(state) for state in real.states.values()}
        for state, dry in self._copies.items():
            dry.group = DryGroup(state.group)
            dry.calls_under_way, dry.run, dry.open_calls, dry.backward_wrappers = [], None, 0, BackwardWrappers()
            dry.stays = None  # that of the last forward
        for state, dry in self._copies.items():
            dry.owner_states = tuple(self._copies[owner] for owner in state.owner_states if owner in self._copies)
            dry.user_states = [ref(self._copies[user]) for user in alive(state.user_states) if user in self._copies]
        self._task, self._launcher = _ReplayedTask(), DryLauncher(self._note, has_streams=real.launcher.has_streams)
        states = {name: self._copies[state] for name, state in real.states.items()}
        passes, observers = cast(Any, _Unwatched()), (_Hooks(self.steps), *(o for o in OBSERVERS if o.is_replayed))
        root = Root(self._copies[real.root_state], states, self._launcher, cast(Any, self._task), passes, observers)
        self._root = root
        self._calls: dict[int, ForwardCall] = {}
        self._restored: Mapping[str, GroupSnapshot] = {}
        root.is_verified = True
        self.restore(start)

    def restore(self, snapshot: Snapshot) -> None:
        """Make the root as it was at ``snapshot``."""
        root, plans = self._root, self._root.plans
        if not snapshot.are_in_flight:
            root.drain()
        plans.known, plans.fused = snapshot.known, snapshot.fused
        root.finalization.is_last_backward = snapshot.waits_after_backward
        for name, of_group in snapshot.groups.items():
            state = root.states[name]
            if not self._restored or self._restored[name].options is not of_group.options:
                state.options = self._of_copies(of_group.options)
            cast(DryGroup, state.group).restore(of_group)
            kept = Kept(-of_group.is_stale, plans.steps.number, of_group.is_frozen)
            state.kept = kept if of_group.is_kept else None
            state.runs = of_group.runs
        plans.refresh()
        if not self._restored:
            root.queue.dissolve(root.states[name] for name in snapshot.dissolved)
        self._restored = snapshot.groups

    @property
    def states(self) -> Mapping[str, FSDPState]:
        return self._root.states

    def _of_copies(self, options: Options) -> Options:
        """Return ``options`` with dry states in place of real ones."""
        forward, backward = (
            None
            if states is None
            else tuple(ref(self._copies[state]) for state in alive(states) if state in self._copies)
            for states in (options.forward_prefetch, options.backward_prefetch)
        )
        return replace(options, forward_prefetch=forward, backward_prefetch=backward)

    def play(self, events: Iterable[tuple[Any, ...]], calls: dict[int, ForwardCall] | None = None) -> None:
        """Play events of one tape. ``calls`` are those of earlier events of the tape, by number, and get these ones."""
        self._calls = {} if calls is None else calls
        for kind, *values in events:
            getattr(self, f"_{kind}")(*values)

    def _note(self, action: Action) -> None:
        if not self.steps:
            self.steps.append((Event(Hook.PRE_FORWARD), []))
        actions = self.steps[-1][1]
        if isinstance(action, WaitReduce) and actions and isinstance(actions[-1], WaitReduce):
            action = WaitReduce(actions.pop().count + 1)  # type: ignore[union-attr]
        actions.append(action)

    # -- events

    def _pre_forward(self, name: str, number: int, has_grad: bool) -> None:
        state = self._root.states[name]
        call = self._calls[number] = ForwardCall(state, self._root, None, None, False)
        state.calls_under_way.append(call)
        with torch.set_grad_enabled(has_grad):
            self._root.pre_forward(state)

    def _post_forward(self, number: int, module_id: int, has_grad: bool) -> None:
        call = self._calls[number]
        call.state.calls_under_way.remove(call)
        with torch.set_grad_enabled(has_grad):
            self._root.post_forward(call, module_id)

    def _abort(self, number: int) -> None:
        call = self._calls[number]
        call.state.calls_under_way.remove(call)
        self._root.abort_forward(call, None)

    def _await_inputs(self, number: int) -> None:
        self._calls[number].await_inputs()

    def _end_unseen(self, number: int) -> None:
        self._calls[number].end_unseen()

    def _enter_task(self, task: int) -> None:
        """Go on in autograd's ``task``. The first one of a backward is its own, and others are inside."""
        if self._root.current_pass is not Pass.BACKWARD:
            self._task.outermost = task
        self._task.is_around_another = task != self._task.outermost

    def _pre_backward(self, number: int, task: int) -> None:
        self._enter_task(task)
        self._root.pre_backward(self._calls[number])

    def _post_backward(self, number: int, is_arriving: bool, task: int) -> None:
        self._enter_task(task)
        call = self._calls[number]
        if is_arriving:
            call.state.group.arrive(is_nested=True)
        self._root.post_backward(call)

    def _gradient_ready(self, name: str, task: int) -> None:
        self._enter_task(task)
        state = self._root.states[name]
        if not self._root.progress.was_seen(state):
            return  # the backward of a forward that is not on the tape
        state.group.arrive(is_nested=True)
        state.group.complete_gradients()
        self._root.gradient_ready(state)

    def _end_backward(self, arriving: Sequence[str]) -> None:
        self._task.is_around_another = False
        for name in arriving:
            self._root.states[name].group.arrive(is_nested=True)
        self._root.end_backward()


_SUMS = SimpleNamespace(wait=lambda: None)


class DryGroup(ParamGroup):
    """A group without parameters, with the name, the plan and the state tables of ``group``."""

    was_flipped = False

    def __init__(self, group: ParamGroup) -> None:
        super().__init__(group.name, (), group.axes, parameters=())
        self.plan, self.process_groups = group.plan, group.process_groups

    def change(self, operation: ParameterOperation) -> ParameterState | None:
        """Change the state, and return the one before; ``None`` if it has not changed."""
        before, self.was_flipped = self.parameter_state, False  # a gather makes the plan anew
        return None if self.advance(operation) is before else before

    def restore(self, snapshot: GroupSnapshot) -> None:
        self.plan, self.parameter_state, self.was_flipped = snapshot.plan, snapshot.parameters, snapshot.was_flipped
        self.gradient_state, self.were_summed = snapshot.gradients, snapshot.were_summed
        self.restore_partial(cast(Any, _SUMS) if snapshot.has_partial else None)


class DryLauncher:
    """Tells ``note`` of each action of a verb that is not done already."""

    def __init__(self, note: Callable[[Action], None], *, has_streams: bool) -> None:
        self.streams: Any = None
        self.has_streams, self._note = has_streams, note

    def gather(self, groups: Sequence[Any], label: str) -> None:
        needed = tuple(group.name for group in groups if group.change(ParameterOperation.UNSHARD) is not None)
        if needed:
            self._note(Gather(needed))

    def wait(self, group: Any) -> None:
        if group.change(ParameterOperation.WAIT) is not None:
            self._note(Wait(group.name))

    def free(self, group: Any) -> None:
        if group.change(ParameterOperation.RESHARD) not in (None, ParameterState.SHRUNK):
            self._note(Free(group.name))

    def shrink(self, group: Any, mesh_size: int) -> None:
        if group.change(ParameterOperation.SHRINK) is not None:
            self._note(Shrink(group.name, mesh_size))

    def reduce(self, launch: ReductionLaunch) -> Any:
        self._note(Reduce(tuple(member.name for member in launch.members), launch.partial))
        for member in launch.members:
            member.begin_reduction(cast(Any, _SUMS), partial=launch.partial)
        return SimpleNamespace(launch=launch)

    def start(self, reduction: Any) -> None: ...

    def finish(self, reduction: Any, unread: Any = None) -> None:
        launch: ReductionLaunch = reduction.launch
        for member in launch.members:
            member.end_reduction(partial=launch.partial)
        self._note(WaitReduce(1))

    def at_end_of_backward(self, callback: Callable[[], None]) -> None: ...


class _ReplayedTask:
    """Autograd's task, as it was at each event."""

    number = outermost = -1
    is_around_another = False


class _Unwatched:
    """Passes of which nobody is told."""

    thread = None
    runs_backward = is_outside_autograd = False

    def begin_forward(self, root: Root, outermost: ForwardCall) -> None: ...

    def begin_backward(self, root: Root) -> Callable[[], None]:
        return root.end_backward

    def reach(self, root: Root, state: FSDPState) -> None: ...

    def end_backward(self, root: Root) -> None: ...

    def end(self, root: Root, *, succeeded: bool = False) -> None: ...


class _Hooks(Observer):
    """Begins a step of the schedule at each hook."""

    def __init__(self, steps: list[tuple[Event, list[Action]]]) -> None:
        self._steps = steps

    def before_hook(self, root: Any, hook: Hook, subject: Any) -> None:
        name = "" if hook in (Hook.END_FORWARD, Hook.END_BACKWARD) else subject.name
        self._steps.append((Event(hook, name), []))
