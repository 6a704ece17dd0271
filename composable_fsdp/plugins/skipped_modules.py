"""Ranks that run different modules (``set_reduce_scatter_unused_params``) launch the same collectives.

All ranks go through all groups in the order in which they are registered: a rank launches the collectives of the groups
that it skips before those of the next group that it runs, and at the ends of forward and backward. Gradients of outer
states wait for the end. So the sequence of collectives is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from composable_fsdp._core import root as core
from composable_fsdp._core.group_plan import ParameterState, Pass
from composable_fsdp._core.params import in_functional_call
from composable_fsdp._core.seams import ObservedRoot, Observer
from composable_fsdp._core.state import Accumulation, ForwardCall, ForwardRecord, FSDPState, find_state
from composable_fsdp.errors import LifecycleError


class SkippedModules(Observer):
    """Stands in for the hooks of the modules that this rank skips, in forwards of one root that need it."""

    is_replayed = True

    def __init__(self) -> None:
        self._current: _CurrentForward | None = None

    def for_root(self, root: ObservedRoot) -> Observer:
        for state in root.states.values():
            state.change(reduced_by_observer=False)
        return SkippedModules()

    def begin_forward(self, root: ObservedRoot, outermost: FSDPState) -> None:
        is_needed = any(state.group.process_groups[0].reduces_unused for state in root.states.values())
        if not is_needed and self._current is None:
            return
        root.observers.remove(self._current)
        self._current = _CurrentForward(root, outermost) if is_needed else None
        root.observers.add(self._current)
        for state in root.states.values():
            state.change(reduced_by_observer=is_needed)
        has_grad = torch.is_grad_enabled()
        _core(root).leads_to_backward = (lambda: has_grad) if is_needed else torch.is_grad_enabled


class _CurrentForward(Observer):
    """A forward of ``outermost``, and its backward, with the same collectives on all ranks."""

    def __init__(self, root: ObservedRoot, outermost: FSDPState) -> None:
        states = {name: root.states[name] for name in _names_beneath(outermost)}
        for state in states.values():
            if len(state.module_refs) > 1:
                raise LifecycleError(
                    f"{state.name!r} are several modules of one group, which have no single position in the order. "
                    "With set_reduce_scatter_unused_params, shard them one by one, or a module that contains them."
                )
        self._groups = UnusedGroups(
            [(name, len(_names_beneath(state)) - 1) for name, state in root.states.items() if name in states]
        )
        self._lowest: dict[ForwardRecord, int] = {}
        """The lowest position that this backward has reached in each forward."""
        self._reached: list[FSDPState] = []
        self._outer: list[FSDPState] = []

    # -- forward

    def begin_run(self, root: ObservedRoot, state: FSDPState) -> None:
        """Do the collectives of the groups skipped before ``state``. A recomputed state must be unsharded.

        Ranks that skip it all-gather later.
        """
        if root.current_pass is not Pass.BACKWARD:
            if self._groups.is_late(state.name):
                raise LifecycleError(
                    f"{state.name!r} runs a second time in one forward, or after a module that is registered behind "
                    "it. With set_reduce_scatter_unused_params, all ranks go through the sharded modules in the order "
                    "in which they are registered, once per forward. Register them in the order in which they run, or "
                    "shard a module that contains them instead of each."
                )
            _take(root, self._groups.up_to(state.name, True))
        elif state.group.parameter_state is ParameterState.SHARDED and state.group.plan.specs:
            raise LifecycleError(
                f"{state.name!r} is recomputed as part of a module around it. With set_reduce_scatter_unused_params, "
                "checkpoint each sharded module by itself (and with use_reentrant=False)."
            )

    def end_run(self, root: ObservedRoot, state: FSDPState) -> None:
        _take(root, self._groups.up_to(state.name, False))

    def end_forward(self, root: ObservedRoot) -> None:
        _take(root, self._groups.rest())

    # -- backward

    def enter_backward(self, root: ObservedRoot, call: ForwardCall) -> None:
        if call.state.group.plan.specs:
            self._reach(root, call.run.record, call.run.position, call.state)

    def _reach(self, root: ObservedRoot, record: ForwardRecord, position: int, running: FSDPState | None) -> None:
        """Join the collectives of the groups that backward skipped before ``running`` at ``position`` of ``record``.

        Gradients that are complete by then are reduced. A state around ``running`` was not skipped: its output may be
        the same tensor.
        """
        for each in newly_reached(self._lowest, record, position):
            self._settle_reached(root)
            state = root.states[record.ended[each]]
            self._reached.append(state)
            if state is running:
                continue
            _core(root).progress.reached.add(state)
            if state.options.unshard_in_backward:
                _core(root).unshard(state, root.planner.backward_of(record, each, state.name), "backward")
            if state.options.reshard_after_backward and (running is None or running.name not in _names_beneath(state)):
                _core(root).launcher.free(state.group)

    def end_backward(self, root: ObservedRoot) -> None:
        for record in list(self._lowest):
            self._reach(root, record, 0, None)
        self._settle_reached(root)
        for state in self._outer:
            _contribute(root, state)
        self.after_reset(root)

    def after_reset(self, root: ObservedRoot) -> None:
        for of_backward in (self._lowest, self._reached, self._outer):
            of_backward.clear()

    def _settle_reached(self, root: ObservedRoot) -> None:
        for state in self._reached:
            if state.has_nested_states:
                self._outer.append(state)
            else:
                _contribute(root, state)
        self._reached.clear()


def newly_reached(lowest: dict[ForwardRecord, int], record: ForwardRecord, position: int) -> range:
    """Return the positions of ``record`` that backward has not reached yet, down to ``position``, and note them."""
    last = lowest.get(record, len(record.ended))
    lowest[record] = min(last, position)
    return range(last - 1, position - 1, -1)


def _contribute(root: ObservedRoot, state: FSDPState) -> None:
    """Reduce the gradients of ``state``, zeros for parameters without one."""
    if state.options.accumulation is not Accumulation.UNSHARDED:
        state.group.contribute()
    _core(root).reduce_gradients(state)


def _core(root: ObservedRoot) -> core.Root:
    assert isinstance(root, core.Root)
    return root


def _take(root: ObservedRoot, skipped: Iterable[tuple[str, bool]]) -> None:
    for name, begins in skipped:
        state, has_grad = root.states[name], root.leads_to_backward()
        if begins:
            _core(root).unshard(state, root.planner.next_run(state), "forward")
        else:
            leads_to_backward = has_grad and bool(state.group.plan.specs)
            root.planner.record.end(state.group.post_forward_event, leads_to_backward=leads_to_backward)
            if state.group.registration.shows_tensors_of_user and in_functional_call():
                state.keeps_unsharded = state.keeps_unsharded or False  # as where its module runs
            _core(root).free_after_forward(state, None, has_grad=has_grad)


class UnusedGroups:
    """Computes the groups that this rank skips, so that it can join their collectives.

    Every rank begins all groups in one order and ends each after those inside it, whatever it runs itself. An event is
    a group with True for its beginning, and False for its end.

    Args:
        order: the groups, each before those inside it, with the number of groups inside.
    """

    def __init__(self, order: Sequence[tuple[str, int]]) -> None:
        self._events: list[tuple[str, bool]] = []
        """The beginnings and ends of all groups."""
        around: list[tuple[str, int]] = []
        for place, (group, inside) in enumerate(order):
            while around and around[-1][1] <= place:
                self._events.append((around.pop()[0], False))
            self._events.append((group, True))
            around.append((group, place + 1 + inside))
        self._events += [(group, False) for group, _ in reversed(around)]
        self._index = {event: index for index, event in enumerate(self._events)}
        self._next = 0
        self._run: set[str] = set()

    def is_late(self, group: str) -> bool:
        """Return whether ``group``, or a later group, has begun already."""
        return self._index.get((group, True), self._next) < self._next

    def up_to(self, group: str, begins: bool) -> list[tuple[str, bool]]:
        """Begin ``group``, or end it, and return the events of skipped groups before that."""
        if begins:
            self._run.add(group)
        begin, end = self._next, self._index.get((group, begins), -1) + 1
        self._next = max(begin, end)
        return [each for each in self._events[begin:end] if each[0] not in self._run]

    def rest(self) -> list[tuple[str, bool]]:
        """Return the events that are left at the end of forward."""
        return self.up_to(*self._events[-1])


def _names_beneath(state: FSDPState) -> set[str]:
    """Return the names of ``state`` and of all states inside its modules."""
    return {below.name for top in state.modules for m in top.modules() if (below := find_state(m)) is not None}
