"""Lazy initialization: builds the iteration of a root from the FSDP states below it, in the first forward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from weakref import ref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from composable_fsdp._core.launcher import StreamLauncher
from composable_fsdp._core.passes_underway import PassesUnderway
from composable_fsdp._core.root import Root
from composable_fsdp._core.seams import OBSERVERS
from composable_fsdp._memory.streams import CommStreams
from composable_fsdp._runtime.groups.callers_context import outside_callers_context, runs_outside
from composable_fsdp._runtime.groups.global_hooks import GlobalHooks
from composable_fsdp._runtime.groups.param_group_gradients import AutogradRun
from composable_fsdp._runtime.groups.state import ITERATION_ATTRIBUTE, FSDPState, find_state, state_of_parameter
from composable_fsdp._runtime.params.optimizer_steps import note_optimizer_step
from composable_fsdp._runtime.params.sharded_param import local_part

__all__ = [
    "ROOT_NAME",
    "assemble",
    "iteration_of",
    "name_states",
    "optimizer_hooks",
    "sharded_parameters",
    "states_by_name",
]

ROOT_NAME = "root"

_roots: tuple[ref[Root], ...] = ()
"""All roots, oldest first: in the same order on every rank. Replaced, never changed."""
_roots_lock = threading.Lock()


def _register(root: Root) -> None:
    global _roots
    with _roots_lock:
        _roots = (*(known for known in _roots if known() is not None), ref(root))


def iteration_of(state: FSDPState) -> Root:
    """Return the iteration of ``state``. If there is none, make one with ``state`` as the root.

    Raises:
        LifecycleError: no module of the root may run now.
    """
    iteration: Root | None = state.iteration
    if iteration is None:
        return assemble(state)
    iteration.check_available()
    return iteration


@runs_outside
def assemble(root: FSDPState) -> Root:
    """Build the iteration of ``root`` and name the states below it by their qualified names.

    A module that ran on its own before its parent was a root; its states now belong to the new root.
    """
    states = states_by_name(root)
    for state in states.values():
        state.group.check_can_unshard()
    for observer in OBSERVERS:
        observer.before_assembly(root, states)
    launcher = StreamLauncher(CommStreams(root.group.axes.device))
    iteration = Root(root, states, launcher, AutogradRun(), PassesUnderway(), OBSERVERS)
    _register(iteration)
    for former in {iteration_of(state) for state in states.values() if state.iteration is not None}:
        former.drain()
        iteration.finalization.take_settings(former.finalization)
        iteration.post_optimizer_event = former.post_optimizer_event or iteration.post_optimizer_event
        for module in former.root.modules:
            vars(module).pop(ITERATION_ATTRIBUTE, None)
    for module in root.modules:
        vars(module)[ITERATION_ATTRIBUTE] = iteration
    for name, state in states.items():
        state.group.rename(name)
        state.group.follow_patches()
        state.iteration = iteration
    return iteration


def states_by_name(root: FSDPState) -> dict[str, FSDPState]:
    """Return the states by name, in module order. A state of several modules has all their names."""
    places: dict[FSDPState, list[str]] = {}
    for index, top in enumerate(root.modules):
        prefix = f"{index}." if len(root.modules) > 1 else ""
        for name, module in top.named_modules():
            state = find_state(module)
            if state is not None and module in state.modules:
                places.setdefault(state, []).append(f"{prefix}{name}" if name else "")
    return name_states(places)


def name_states(places: Mapping[FSDPState, Sequence[str]]) -> dict[str, FSDPState]:
    """Return states by their modules' names. A state without a name is the root, even if a module is called "root"."""
    named = {", ".join(filter(None, names)): state for state, names in places.items()}
    root = ROOT_NAME if ROOT_NAME not in named else f"({ROOT_NAME})"
    return {name or root: state for name, state in named.items()}


def _install_optimizer_hooks() -> Callable[[], None]:
    def before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        with optimizer_hooks, outside_callers_context():
            for observer in OBSERVERS:
                observer.before_step(optimizer)

    def after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        with optimizer_hooks, outside_callers_context():
            _note_step(optimizer)

    handles = register_optimizer_step_pre_hook(before_step), register_optimizer_step_post_hook(after_step)

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


optimizer_hooks = GlobalHooks(_install_optimizer_hooks)
"""The hooks that tell observers of steps, and count them."""


def _note_step(optimizer: torch.optim.Optimizer) -> None:
    """Record a step for the roots whose parameters ``optimizer`` holds, or their local shards, and for no other root.

    A model of another thread, or one that only some ranks train, must not make kept parameters be gathered again.
    """
    sharded = sharded_parameters(optimizer)
    note_optimizer_step([p for p, _ in sharded])
    stepped: Iterable[Root] = _iterations_of(sharded)
    if not sharded:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        storages = {local_part(p).untyped_storage()._cdata for p in parameters}
        stepped = [iteration for known in _roots if (iteration := known()) and iteration.has_shards_in(storages)]
    for iteration in stepped:
        iteration.plans.steps.note()


def sharded_parameters(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, FSDPState]]:
    """Return the sharded parameters that ``optimizer`` holds, with their states."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return [(p, state) for p in parameters if (state := state_of_parameter(p)) is not None]


def _iterations_of(sharded: Sequence[tuple[torch.Tensor, FSDPState]]) -> set[Root]:
    return {iteration_of(state) for state in {state for _, state in sharded} if state.iteration is not None}
