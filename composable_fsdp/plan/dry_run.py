"""The schedule of a step, as text and by a dry run: the events of the last step, played through the root's own code.

The launcher of a dry run only notes what it is told.

Events are recorded from the first schedule on. A dry group has the frozen plan of a real one, its state tables, and no
parameters. Observers that act on groups (``is_replayed``) are attached to the dry root too.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn, TypeAlias, cast
from weakref import WeakKeyDictionary, ref

import torch

from composable_fsdp._core.events import (
    Event,
    GradientOperation,
    GradientState,
    Hook,
    ParameterOperation,
    ParameterState,
    Pass,
)
from composable_fsdp._core.group import ParamGroup
from composable_fsdp._core.launch import GroupReduction
from composable_fsdp._core.root import Root
from composable_fsdp._core.seams import OBSERVERS, Observer
from composable_fsdp._core.state import (
    BackwardWrappers,
    ForwardCall,
    ForwardRecord,
    FSDPState,
    Kept,
    Options,
    alive,
    find_state,
)
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
        lines = (f"{step.event!s:<{width}} | {'; '.join(map(str, step.actions))}" for step in self.steps)
        return "\n".join(line.rstrip(" |") for line in lines)


_EVENTS_PER_GROUP = 128
"""With more events, a step is given up: no backward follows its forwards, or many backwards follow one of them."""


class StepRecorder(Observer):
    """Records the events of each step of a root, from the moment on in which :meth:`of` attaches it.

    A step is the forwards that lead to a backward, and the backwards after them. An event is a hook, with what a dry
    run cannot look up later.
    """

    def __init__(self) -> None:
        self._events: list[tuple[Any, ...]] = []
        self._of_forward = self._events
        """The events of the current or last forward: those of the step, or of a forward without a backward."""
        self._is_whole = self._has_backward = False
        self._numbers: WeakKeyDictionary[ForwardCall, tuple[list[tuple[Any, ...]], int]] = WeakKeyDictionary()
        """The list that has the pre-forward of each call, and its index there."""
        self._open: list[ref[ForwardCall]] = []
        """The calls that have begun, and not ended as far as events tell, innermost last."""
        self._ended: ref[ForwardCall] | None = None
        """The call that ended last, whose output nodes were not known at that event."""

    @classmethod
    def of(cls, root: Root) -> StepRecorder:
        """Return the recorder of ``root``, which is attached to it now if it had none."""
        found = next((each for each in root.observers.attached if isinstance(each, cls)), None) or cls()
        root.observers.add(found)
        return found

    @property
    def step(self) -> list[tuple[Any, ...]] | None:
        """The events of the last step, or ``None`` if they are not known from its beginning on."""
        self._complete(None)
        return self._events if self._is_whole and self._events else None

    def begin_forward(self, root: Any, outermost: FSDPState) -> None:
        self._complete(None)
        leads_to_backward, follows_forwards = torch.is_grad_enabled(), bool(root.progress.forwards)
        self._bound(root)
        if leads_to_backward and not (self._is_whole and (follows_forwards or not self._has_backward)):
            self._events, self._is_whole, self._has_backward = [], True, False
        self._of_forward = self._events if leads_to_backward else []

    def _bound(self, root: Any) -> None:
        if len(self._events) > _EVENTS_PER_GROUP * (len(root.states) + 1):
            self._events, self._is_whole = [], False

    def _complete(self, ending: ForwardCall | None) -> None:
        """Record what has come since the last event: calls that raised, and the nodes of the one that ended last."""
        last, self._ended = self._ended() if self._ended is not None else None, None
        if last is not None and (last.awaits or last.run.position in last.run.record.unseen):
            events, number = self._numbers[last]
            events.append(("await_inputs" if last.awaits else "end_unseen", number))
        while self._open:
            innermost = self._open[-1]()
            if innermost is ending or (innermost is not None and innermost.caller is not None):
                return
            self._open.pop()
            if innermost is not None:
                events, number = self._numbers[innermost]
                events.append(("abort", number))

    def enter_call(self, root: Any, call: ForwardCall) -> None:
        self._complete(None)
        events = self._events if root.current_pass is Pass.BACKWARD else self._of_forward
        self._numbers[call] = events, len(events)
        self._open.append(ref(call))
        events.append(("pre_forward", call.name, len(events), torch.is_grad_enabled()))

    def before_hook(self, root: Any, hook: Hook, subject: Any) -> None:
        if hook in (Hook.PRE_FORWARD, Hook.END_FORWARD):  # the latter is inside of the post-forward of a call
            return
        task, is_call = torch._C._current_graph_task_id(), isinstance(subject, ForwardCall)
        self._complete(subject if hook is Hook.POST_FORWARD else None)
        if hook in (Hook.PRE_BACKWARD, Hook.GRAD_READY) and root.current_pass is not Pass.BACKWARD:
            self._bound(root)
        events, number = self._numbers.get(subject, ([], -1)) if is_call else (self._events, -1)
        if hook is Hook.POST_FORWARD and number >= 0:
            self._open.pop()
            self._ended, left = ref(subject), subject.run.remaining
            left = None if left is None else frozenset(left)
            events.append(("post_forward", number, left, torch.is_grad_enabled()))
        elif hook is Hook.PRE_BACKWARD and events is self._events:
            events.append(("pre_backward", number, task))
        elif hook is Hook.GRAD_READY:
            events.append(("gradient_ready", subject.name, task))
        elif hook is Hook.POST_BACKWARD and events is self._events:
            is_arriving = subject.state.group.gradient_state is GradientState.ARRIVING
            events.append(("post_backward", number, is_arriving, task))
        elif hook is Hook.END_BACKWARD and events and events[-1][0] != "end_backward":
            arriving = [n for n, s in root.states.items() if s.group.gradient_state is GradientState.ARRIVING]
            events.append(("end_backward", arriving))
            self._has_backward = True

    def failed(self, root: Any, running: object) -> None:
        self.after_reset(root)

    def after_reset(self, root: Any) -> None:
        self._events, self._is_whole, self._has_backward, self._ended = [], False, False, None
        self._open.clear()


def schedule_of(root: Root) -> Schedule:
    """Return the schedule of the next step of ``root``, if it has the events of the last one and a step of optimizers.

    From the first call on, the events of steps are recorded. Until then they are those of an ordinary step in the order
    of the last forward. Before a first forward it is empty.
    """
    events = StepRecorder.of(root).step
    replay = Replay(root, has_stepped=True, at_rest=not events)
    replay.play(events or events_of(root.plans.known, root.states))
    return Schedule(tuple(Step(event, tuple(actions)) for event, actions in replay.steps))


def events_of(record: ForwardRecord, states: Mapping[str, FSDPState]) -> list[tuple[Any, ...]]:
    """Return the events of a step with the forward of ``record``, and a backward in which all gradients arrive.

    Unlike recorded ones, they are the same on every rank, also if ranks use different parameters of their modules.
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
        _, *others = states[name].module_ids
        comes_back = position < len(ended) and ended[position] == name
        events.append(("post_forward", number, frozenset(others) if others else None, True))
        for at in range(len(others)):  # modules of the same run
            later = frozenset(others[at + 1 :])
            events += [("pre_forward", name, len(events), True), ("post_forward", len(events), later, True)]
        order.append((False, name, number))
        if comes_back:
            positions[number] = position
            events.append(("end_unseen" if position in record.unseen else "await_inputs", number))
    runs = Counter(name for begins, name, number in order if begins and number in positions)
    left = runs.copy()
    for begins, name, number in reversed(order):
        if number not in positions:
            continue
        plan, early = states[name].group.plan, _params_after_nested(states[name])
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


def _params_after_nested(state: FSDPState) -> list[int]:
    """Return the indices of the parameters whose modules follow a nested group in module order."""
    if not state.has_nested_states:
        return []
    order = [m for module in state.modules for m in module.modules()]
    first = next((at for at, m in enumerate(order) if find_state(m) not in (None, state)), len(order))
    later = {id(module) for module in order[first:]}
    return [i for i, p in enumerate(state.group.parameters) if any(id(module) in later for module, _ in p.owners)]


class Replay:
    """A root like ``real``, without tensors, on which events are played. ``steps`` are the actions of each hook.

    Args:
        real: the root, between passes.
        has_stepped: as it is after another step of its optimizers.
        at_rest: all groups are sharded, without gradients: the same on every rank.
    """

    def __init__(self, real: Root, *, has_stepped: bool = False, at_rest: bool = False) -> None:
        self.steps: list[tuple[Event, list[Action]]] = []
        self._copies = {state: copy.copy(state) for state in real.states.values()}
        for state, dry in self._copies.items():
            dry.group = DryGroup(state.group, at_rest=at_rest)
            dry.calls_under_way, dry.run, dry.open_calls, dry.backward_wrappers = [], None, 0, BackwardWrappers()
            dry.keeps_unsharded = None  # that of the last forward
        for state, dry in self._copies.items():
            dry.owner_states = tuple(self._copies[owner] for owner in state.owner_states if owner in self._copies)
            dry.user_states = [ref(self._copies[user]) for user in alive(state.user_states) if user in self._copies]
            dry.options = self._of_copies(state.options)
        self._task, self._launcher = _ReplayedTask(), DryLauncher(self._note, has_streams=real.launcher.has_streams)
        states = {name: self._copies[state] for name, state in real.states.items()}
        passes, observers = cast(Any, _Unwatched()), (_Hooks(self.steps), *(o for o in OBSERVERS if o.is_replayed))
        root = Root(self._copies[real.root_state], states, self._launcher, cast(Any, self._task), passes, observers)
        self._root, plans = root, root.plans
        self._calls: dict[int, ForwardCall] = {}
        root.is_verified = True
        plans.known, plans.fused = real.plans.known, real.plans.fused
        root.finalization.is_last_backward = real.waits_after_backward
        for state, dry in self._copies.items():
            kept, dry.kept = state.kept, None
            if kept is not None and not at_rest:
                is_stale = (has_stepped and not kept.is_frozen) or real.plans.is_stale(state)
                dry.kept = Kept(-is_stale, plans.steps.number, kept.is_frozen)
        plans.refresh()
        if not at_rest:
            root.queue.dissolve(self._copies[state] for state in real.queue.dissolved)

    def _of_copies(self, options: Options) -> Options:
        """Return ``options`` with dry states in place of real ones."""
        forward, backward = (
            None
            if states is None
            else tuple(ref(self._copies[state]) for state in alive(states) if state in self._copies)
            for states in (options.forward_prefetch, options.backward_prefetch)
        )
        return replace(options, forward_prefetch=forward, backward_prefetch=backward)

    def play(self, events: Iterable[tuple[Any, ...]]) -> None:
        """Play the recorded events of a step."""
        self._calls.clear()
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
        call = self._calls[number] = ForwardCall(state, self._root)
        state.calls_under_way.append(call)
        with torch.set_grad_enabled(has_grad):
            self._root.pre_forward(call)

    def _post_forward(self, number: int, left: frozenset[int] | None, has_grad: bool) -> None:
        call = self._calls[number]
        call.state.calls_under_way.remove(call)
        if left is not None:
            call.run.remaining = set(left)
        with torch.set_grad_enabled(has_grad):
            self._root.post_forward(call)

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
            return  # the backward of a forward that was not recorded
        cast(DryGroup, state.group).complete_gradients()
        self._root.gradient_ready(state)

    def _end_backward(self, arriving: Sequence[str]) -> None:
        self._task.is_around_another = False
        for name in arriving:
            self._root.states[name].group.arrive(is_nested=True)
        self._root.end_backward()


_SUMS = SimpleNamespace(wait=lambda: None)


class DryGroup(ParamGroup):
    """A group without parameters, with the name, the plan and the states of ``group``, unless it is ``at_rest``."""

    was_flipped = False

    def __init__(self, group: ParamGroup, *, at_rest: bool) -> None:
        super().__init__(group.name, (), group.axes, parameters=())
        self.plan, self.process_groups = group.plan, group.process_groups
        if not at_rest:
            self.parameter_state, self.was_flipped = group.parameter_state, group.was_flipped
            self.gradient_state, self.were_summed = group.gradient_state, group.were_summed
            self.partial = None if group.partial is None else cast(Any, _SUMS)

    def change(self, operation: ParameterOperation) -> ParameterState | None:
        """Change the state, and return the one before; ``None`` if it has not changed."""
        before, self.was_flipped = self.parameter_state, False  # a gather makes the plan anew
        return None if self.advance(operation) is before else before

    def complete_gradients(self) -> None:
        """Note that all gradients of this backward have arrived."""
        self._advance_gradients(GradientOperation.READY)


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

    def reduce(self, reduction: GroupReduction) -> None:
        self._note(Reduce(tuple(member.name for member in reduction.members), reduction.partial))
        for member in reduction.members:
            member.begin_reduction(cast(Any, _SUMS), partial=reduction.partial)

    def start(self, reduction: GroupReduction) -> None: ...

    def finish(self, reduction: GroupReduction, unread: Any = None) -> None:
        for member in reduction.members:
            member.end_reduction(partial=reduction.partial)
        self._note(WaitReduce(1))

    def at_end_of_backward(self, callback: Callable[[], None]) -> None: ...


class _ReplayedTask:
    """Autograd's task, as it was at each event."""

    number = outermost = -1
    is_around_another = False


class _Unwatched:
    """Passes of which nobody is told."""

    thread = backward = None
    runs_backward = is_outside_autograd = False

    def begin_forward(self, root: Root, outermost: ForwardCall) -> None: ...

    def begin_backward(self, root: Root) -> Callable[[], None]:
        return root.end_backward

    def end_backward(self, root: Root) -> None: ...

    def end(self, root: Root, *, succeeded: bool = False) -> None: ...


class _Hooks(Observer):
    """Begins a step of the schedule at each hook."""

    def __init__(self, steps: list[tuple[Event, list[Action]]]) -> None:
        self._steps = steps

    def before_hook(self, root: Any, hook: Hook, subject: Any) -> None:
        name = "" if hook in (Hook.END_FORWARD, Hook.END_BACKWARD) else subject.name
        self._steps.append((Event(hook, name), []))
