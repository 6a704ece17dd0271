"""The schedule of a step, as text and by a dry run: events of an ordinary step, played through the root's own code.

The events follow from the order of the last forward, so that they are the same on all ranks. The launcher of a dry run
only notes what it is told. A dry group has the frozen plan of a real one, its state tables, and no parameters.
Observers that act on groups (``is_replayed``) are attached to the dry root too.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from weakref import ref

import torch

from composable_fsdp._core.backward import GroupReduction
from composable_fsdp._core.group import ParamGroup
from composable_fsdp._core.group_plan import Event, GradientOperation, Hook, ParameterOperation, ParameterState
from composable_fsdp._core.root import Root
from composable_fsdp._core.seams import OBSERVERS, Observer
from composable_fsdp._core.state import BackwardWrappers, ForwardCall, ForwardRecord, FSDPState, alive, find_state


class Action(NamedTuple):
    """One call of the launcher at an event of the schedule.

    Args:
        verb: ``"gather"`` launches one all-gather, without groups that are unsharded or in flight already. ``"wait"``
            waits for it and registers the unsharded parameters; ``"free"`` registers the sharded ones and frees the
            unsharded; ``"shrink"`` frees all but a slice, from which ``number`` neighbouring ranks gather them again.
            ``"reduce"`` launches one reduction, and ``"wait for"`` completes the oldest ``number`` in flight.
        groups: the names of its groups.
        number: see ``verb``.
        is_partial: the reduction ends after the shard axis, and its sums are kept.
    """

    verb: str
    groups: tuple[str, ...] = ()
    number: int = 0
    is_partial: bool = False

    def __str__(self) -> str:
        if self.verb == "wait for":
            return f"wait for {self.number} reduction{'s' if self.number > 1 else ''}"
        where = f" to {self.number} ranks" if self.verb == "shrink" else " over the shard axis" * self.is_partial
        return f"{self.verb} {', '.join(self.groups)}{where}"


class Step(NamedTuple):
    """An event and the actions that it triggers, in order."""

    event: Event
    actions: tuple[Action, ...]


class Schedule(tuple[Step, ...]):
    """The actions at each event of a forward and its backward, as this rank performs them.

    Invariants: a group is waited for before its modules compute, and freed or kept after. Every group is reduced once.
    A schedule without its prefetches computes the same values. ``print`` shows it as a table.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        if not self:
            return "(no forward has run yet, so the order of the groups is unknown)"
        width = max(len(str(step.event)) for step in self)
        lines = (f"{step.event!s:<{width}} | {'; '.join(map(str, step.actions))}" for step in self)
        return "\n".join(line.rstrip(" |") for line in lines)


def schedule_of(root: Root) -> Schedule:
    """Return the schedule of an ordinary step of ``root`` that begins at rest: empty before a first forward."""
    replay = Replay(root)
    replay.play()
    return Schedule(Step(event, tuple(actions)) for event, actions in replay.steps)


def _params_after_nested(state: FSDPState) -> list[int]:
    """Return the indices of the parameters whose modules follow a nested group in module order."""
    if not state.has_nested_states:
        return []
    order = [m for module in state.modules for m in module.modules()]
    first = next((at for at, m in enumerate(order) if find_state(m) not in (None, state)), len(order))
    later = {id(module) for module in order[first:]}
    return [i for i, p in enumerate(state.group.parameters) if any(id(module) in later for module, _ in p.owners)]


_SUMS: Any = SimpleNamespace(wait=lambda: None)


class Replay(Observer):
    """A root like ``real`` at rest, without tensors, on which a step is played.

    It is an observer of that root, which begins a step of the schedule at each hook, and its launcher, which notes each
    action that is not done already. ``steps``: the actions of hooks.
    """

    streams: Any = None

    def __init__(self, real: Root) -> None:
        self.steps: list[tuple[Event, list[Action]]] = []
        self.has_streams = real.launcher.has_streams
        self._real = real
        copies = {state: copy.copy(state) for state in real.states.values()}
        for state, dry in copies.items():
            dry.group = DryGroup(state.group)
            dry.calls_under_way, dry.run, dry.open_calls, dry.backward_wrappers = [], None, 0, BackwardWrappers()
            dry.kept = dry.keeps_unsharded = None  # those of the last forward

        def dry_of(states: Any) -> tuple[Any, ...]:
            return tuple(ref(copies[state]) for state in alive(states) if state in copies)

        for state, dry in copies.items():
            dry.owner_states = tuple(copies[owner] for owner in state.owner_states if owner in copies)
            dry.user_states = list(dry_of(state.user_states))
            names = ("forward_prefetch", "backward_prefetch")
            chosen: dict[str, Any] = {
                name: dry_of(states) for name in names if (states := getattr(state.options, name)) is not None
            }
            dry.options = replace(state.options, **chosen)
        states = {name: copies[state] for name, state in real.states.items()}
        task: Any = SimpleNamespace(number=-1, outermost=-1, is_around_another=False, is_outside=False)  # autograd's
        observers = (self, *(o for o in OBSERVERS if o.is_replayed))
        root = self._root = Root(copies[real.root_state], states, cast(Any, self), task, observers)
        root.is_verified = True
        for dry in states.values():
            dry.root = root
        root.planner.known = dict.fromkeys(states.values(), real.planner.last_known)
        root.planner.fused = real.planner.fused
        root.finalization.is_last_backward = real.waits_after_backward
        root.planner.refresh()

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

    # The observer of the dry root.

    def before_hook(self, root: Any, hook: Hook, subject: Any) -> None:
        name = "" if hook in (Hook.END_FORWARD, Hook.END_BACKWARD) else subject.name
        self.steps.append((Event(hook, name), []))

    # Its launcher.

    def _note(self, verb: str, *groups: str, number: int = 0, is_partial: bool = False) -> None:
        self.steps[-1][1].append(Action(verb, groups, number, is_partial))

    def gather(self, groups: Sequence[Any], label: str) -> None:
        needed = [group.name for group in groups if group.change(ParameterOperation.UNSHARD) is not None]
        if needed:
            self._note("gather", *needed)

    def wait(self, group: Any) -> None:
        if group.change(ParameterOperation.WAIT) is not None:
            self._note("wait", group.name)

    def free(self, group: Any) -> None:
        if group.change(ParameterOperation.RESHARD) not in (None, ParameterState.SHRUNK):
            self._note("free", group.name)

    def shrink(self, group: Any, mesh_size: int) -> None:
        if group.change(ParameterOperation.SHRINK) is not None:
            self._note("shrink", group.name, number=mesh_size)

    def reduce(self, reduction: GroupReduction) -> None:
        self._note("reduce", *(member.name for member in reduction.members), is_partial=reduction.is_partial)
        for member in reduction.members:
            member.begin_reduction(_SUMS, is_partial=reduction.is_partial)

    def start(self, reduction: GroupReduction) -> None: ...

    def finish(self, reduction: GroupReduction, unread: Any = None) -> None:
        for member in reduction.members:
            member.end_reduction(_SUMS, is_partial=reduction.is_partial)
        actions = self.steps[-1][1]
        before = actions.pop().number if actions and actions[-1].verb == "wait for" else 0
        self._note("wait for", number=before + 1)

    def at_end_of_backward(self, callback: Callable[[], None]) -> None: ...


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
