"""The schedule of a step, as text and by a dry run: events of an ordinary step, played through the root's own code.

The events follow from the order of the last forward, so that they are the same on all ranks. The launcher of a dry run
only notes what it is told. A dry group has the frozen plan of a real one, its state tables, and no parameters.
Observers that act on groups (``is_replayed``) are attached to the dry root too.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn, TypeAlias, cast
from weakref import ref

import torch

from composable_fsdp._core.backward import GroupReduction
from composable_fsdp._core.group import ParamGroup
from composable_fsdp._core.group_plan import (
    Event,
    GradientOperation,
    Hook,
    ParameterOperation,
    ParameterState,
)
from composable_fsdp._core.root import Root
from composable_fsdp._core.seams import OBSERVERS, Observer
from composable_fsdp._core.state import (
    BackwardWrappers,
    ForwardCall,
    ForwardRecord,
    FSDPState,
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


@dataclass(frozen=True, repr=False)
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

    def at(self, hook: Hook) -> list[Step]:
        """Return the steps of ``hook``, in order."""
        return [step for step in self.steps if step.event.hook is hook]

    def __repr__(self) -> str:
        if not self.steps:
            return "(no forward has run yet, so the order of the groups is unknown)"
        width = max(len(str(step.event)) for step in self.steps)
        lines = (f"{step.event!s:<{width}} | {'; '.join(map(str, step.actions))}" for step in self.steps)
        return "\n".join(line.rstrip(" |") for line in lines)


def schedule_of(root: Root) -> Schedule:
    """Return the schedule of an ordinary step of ``root`` that begins at rest: empty before a first forward."""
    replay = Replay(root)
    replay.play()
    return Schedule(tuple(Step(event, tuple(actions)) for event, actions in replay.steps))


def _params_after_nested(state: FSDPState) -> list[int]:
    """Return the indices of the parameters whose modules follow a nested group in module order."""
    if not state.has_nested_states:
        return []
    order = [m for module in state.modules for m in module.modules()]
    first = next((at for at, m in enumerate(order) if find_state(m) not in (None, state)), len(order))
    later = {id(module) for module in order[first:]}
    return [i for i, p in enumerate(state.group.parameters) if any(id(module) in later for module, _ in p.owners)]


class Replay:
    """A root like ``real`` at rest, without tensors, on which a step is played. ``steps``: the actions of hooks."""

    def __init__(self, real: Root) -> None:
        self.steps: list[tuple[Event, list[Action]]] = []
        self._real = real
        self._copies = {state: copy.copy(state) for state in real.states.values()}
        for state, dry in self._copies.items():
            dry.group = DryGroup(state.group)
            dry.calls_under_way, dry.run, dry.open_calls, dry.backward_wrappers = [], None, 0, BackwardWrappers()
            dry.kept = dry.keeps_unsharded = None  # those of the last forward
        for state, dry in self._copies.items():
            dry.owner_states = tuple(self._copies[owner] for owner in state.owner_states if owner in self._copies)
            dry.user_states = [ref(self._copies[user]) for user in alive(state.user_states) if user in self._copies]
            dry.options = self._of_copies(state.options)
        launcher, task = DryLauncher(self._note, has_streams=real.launcher.has_streams), cast(Any, _ReplayedTask())
        states = {name: self._copies[state] for name, state in real.states.items()}
        observers = (_Hooks(self.steps), *(o for o in OBSERVERS if o.is_replayed))
        root = self._root = Root(self._copies[real.root_state], states, launcher, task, observers)
        root.is_verified = True
        for dry in states.values():
            dry.root = root
        root.planner.known = dict.fromkeys(states.values(), real.planner.last_known)
        root.planner.fused = real.planner.fused
        root.finalization.is_last_backward = real.waits_after_backward
        root.planner.refresh()

    def _of_copies(self, options: Options) -> Options:
        """Return ``options`` with dry states in place of real ones."""
        forward, backward = (
            None
            if states is None
            else tuple(ref(self._copies[state]) for state in alive(states) if state in self._copies)
            for states in (options.forward_prefetch, options.backward_prefetch)
        )
        return replace(options, forward_prefetch=forward, backward_prefetch=backward)

    def _note(self, action: Action) -> None:
        actions = self.steps[-1][1]
        if isinstance(action, WaitReduce) and actions and isinstance(actions[-1], WaitReduce):
            action = WaitReduce(actions.pop().count + 1)  # type: ignore[union-attr]
        actions.append(action)

    def play(self) -> None:
        """Play the last forward, and a backward in which all gradients arrive."""
        record, states = self._real.planner.last_known, self._real.states
        order: list[tuple[bool, ForwardCall]] = []  # the beginnings and ends of runs, with their first calls
        positions: dict[ForwardCall, int] = {}  # those in the record, of the calls to which backward comes back
        running: dict[str, list[ForwardCall]] = {}
        ends = (event.group for event in record.events if event.hook is Hook.POST_FORWARD)
        ended = record.ended or [name for name in ends if states[name].group.plan.specs]  # after an evaluation
        for hook, name in record.events:
            if hook is Hook.PRE_FORWARD:
                running.setdefault(name, []).append(self._begin(name))
                order.append((True, running[name][-1]))
                continue
            call, position = running[name].pop(), len(positions)
            _, *others = map(id, states[name].modules)
            self._end(call, others)
            for at in range(len(others)):  # modules of the same run
                self._end(self._begin(name), others[at + 1 :])
            order.append((False, call))
            if position < len(ended) and ended[position] == name:
                positions[call] = position
                (call.end_without_hook if position in record.ends_without_hook else call.await_inputs)()
        self._play_backward([(begins, call) for begins, call in order if call in positions], record, positions)

    def _play_backward(
        self, order: Sequence[tuple[bool, ForwardCall]], record: ForwardRecord, positions: Mapping[ForwardCall, int]
    ) -> None:
        root = self._root
        runs = Counter(call.name for begins, call in order if begins)
        left = runs.copy()
        for begins, call in reversed(order):
            name, state, early = call.name, call.state, _params_after_nested(self._real.states[call.name])
            trainable = {index for index, spec in enumerate(state.group.plan.specs) if spec.trainable}
            is_early = bool(trainable) and trainable <= set(early) and runs[name] == 1
            left[name] -= begins
            if not begins:
                root.pre_backward(call)
            if trainable and (not begins if is_early else begins and not left[name]):
                cast(DryGroup, state.group).complete_gradients()
                root.gradient_ready(state)
            if begins and positions[call] not in record.ends_without_hook:
                root.post_backward(call)
        if order:
            root.end_backward()

    def _begin(self, name: str) -> ForwardCall:
        """Begin a call of a module of a group."""
        call = ForwardCall(self._root.states[name], self._root)
        call.state.calls_under_way.append(call)
        with torch.enable_grad():
            self._root.pre_forward(call)
        return call

    def _end(self, call: ForwardCall, remaining: Sequence[int]) -> None:
        """End a call. ``remaining`` are the modules of its run that have not run."""
        call.state.calls_under_way.remove(call)
        if call.run.remaining is not None:
            call.run.remaining = set(remaining)
        with torch.enable_grad():
            self._root.post_forward(call)


_SUMS = SimpleNamespace(wait=lambda: None)


class DryGroup(ParamGroup):
    """A group at rest without parameters, with the name and the plan of ``group``."""

    was_flipped = False

    def __init__(self, group: ParamGroup) -> None:
        super().__init__(group.name, (), group.axes, parameters=())
        self.plan, self.process_groups = group.plan, group.process_groups

    def change(self, operation: ParameterOperation) -> ParameterState | None:
        """Change the state, and return the one before; ``None`` if it has not changed."""
        before = self.parameter_state
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
        self._note(Reduce(tuple(member.name for member in reduction.members), reduction.is_partial))
        for member in reduction.members:
            member.begin_reduction(cast(Any, _SUMS), is_partial=reduction.is_partial)

    def start(self, reduction: GroupReduction) -> None: ...

    def finish(self, reduction: GroupReduction, unread: Any = None) -> None:
        for member in reduction.members:
            member.end_reduction(cast(Any, _SUMS), is_partial=reduction.is_partial)
        self._note(WaitReduce(1))

    def at_end_of_backward(self, callback: Callable[[], None]) -> None: ...


class _ReplayedTask:
    """Autograd's task of the only backward."""

    number = outermost = -1
    is_around_another = is_outside = False


class _Hooks(Observer):
    """Begins a step of the schedule at each hook."""

    def __init__(self, steps: list[tuple[Event, list[Action]]]) -> None:
        self._steps = steps

    def before_hook(self, root: Any, hook: Hook, subject: Any) -> None:
        name = "" if hook in (Hook.END_FORWARD, Hook.END_BACKWARD) else subject.name
        self._steps.append((Event(hook, name), []))
