"""Lazy initialization: builds the iteration of a root from the FSDP states below it, in the first forward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from composable_fsdp._memory.streams import CommStreams
from composable_fsdp._runtime.groups.callers_context import outside_callers_context, runs_outside
from composable_fsdp._runtime.groups.global_hooks import GlobalHooks
from composable_fsdp._runtime.groups.late_tied_weights import tie_weights
from composable_fsdp._runtime.groups.state import ITERATION_ATTRIBUTE, FSDPState, find_state, state_of_parameter
from composable_fsdp._runtime.groups.unmanaged_params import warn_of_unmanaged
from composable_fsdp._runtime.params.optimizer_steps import note_optimizer_step
from composable_fsdp._runtime.params.sharded_param import find_parameter, find_replaced, find_unsharded, local_part
from composable_fsdp._runtime.root.iteration import Iteration, known_iterations
from composable_fsdp._runtime.root.recovery import set_order_check
from composable_fsdp.errors import ConfigurationError, LifecycleError

__all__ = [
    "ROOT_NAME",
    "LowPrecisionWarning",
    "assemble",
    "iteration_of",
    "known_iteration",
    "name_states",
    "optimizer_hooks",
    "states_by_name",
]

ROOT_NAME = "root"

_has_warned_of_low_precision = False
_CHECKED_ATTRIBUTE = "_composable_fsdp_checked"
"""The attribute of checked optimizers with their number of parameters then. Copies and pickles do not have it."""


def known_iteration(state: FSDPState) -> Iteration | None:
    """Return the iteration of ``state``, or ``None`` before its root is initialized."""
    iteration = state.iteration
    assert iteration is None or isinstance(iteration, Iteration)
    return iteration


def iteration_of(state: FSDPState) -> Iteration:
    """Return the iteration of ``state``. If there is none, make one with ``state`` as the root.

    Raises:
        LifecycleError: full parameters of the root are registered for the user.
    """
    iteration = known_iteration(state)
    if iteration is None:
        return assemble(state)
    iteration.check_not_lent()
    return iteration


@runs_outside
def assemble(root: FSDPState) -> Iteration:
    """Build the iteration of ``root`` and name the states below it by their qualified names.

    A module that ran on its own before its parent was a root; its states now belong to the new root.
    """
    warn_of_unmanaged(root)
    states = states_by_name(root)
    for state in states.values():
        state.group.check_can_unshard()
    tie_weights(list(states.values()))
    iteration = Iteration(root, states, CommStreams(root.group.axes.device))
    set_order_check(
        states.values(), root.order_check
    )  # resets the setting of an earlier model on the same process groups
    for former in {iteration_of(state) for state in states.values() if state.iteration is not None}:
        former.drain()
        iteration.is_last_backward &= former.is_last_backward
        iteration.finalization.is_manual |= former.finalization.is_manual
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
            _check_optimizer(optimizer)
            _check_gradients(optimizer)
            _wait_for_readers(optimizer)

    def after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        with optimizer_hooks, outside_callers_context():
            _note_step(optimizer)

    handles = register_optimizer_step_pre_hook(before_step), register_optimizer_step_post_hook(after_step)

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


optimizer_hooks = GlobalHooks(_install_optimizer_hooks)
"""The hooks that check optimizers before a step and count steps after it."""


def _note_step(optimizer: torch.optim.Optimizer) -> None:
    """Record a step for the roots whose parameters ``optimizer`` holds, or their local shards, and for no other root.

    A model of another thread, or one that only some ranks train, must not make kept parameters be gathered again.
    """
    sharded = _sharded_parameters(optimizer)
    note_optimizer_step([p for p, _ in sharded])
    stepped: Iterable[Iteration] = _iterations_of(sharded)
    if not sharded:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        storages = {local_part(p).untyped_storage()._cdata for p in parameters}
        stepped = [iteration for iteration in known_iterations() if iteration.has_shards_in(storages)]
    for iteration in stepped:
        iteration.steps.note()


def _wait_for_readers(optimizer: torch.optim.Optimizer) -> None:
    """Wait until no rank reads shared memory that ``optimizer`` will write. Parameters are looked up only if needed."""
    awaiting = [iteration for iteration in known_iterations() if iteration.awaits_readers]
    if awaiting:
        own = _iterations_of(_sharded_parameters(optimizer))
        for iteration in awaiting:
            if iteration in own:
                iteration.wait_for_readers()


def _sharded_parameters(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, FSDPState]]:
    """Return the sharded parameters that ``optimizer`` holds, with their states."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return [(p, state) for p in parameters if (state := state_of_parameter(p)) is not None]


def _iterations_of(sharded: Sequence[tuple[torch.Tensor, FSDPState]]) -> set[Iteration]:
    return {iteration_of(state) for state in {state for _, state in sharded} if state.iteration is not None}


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise if ``optimizer`` holds tensors that sharded parameters have replaced, or unsharded parameters."""
    number = sum(len(group["params"]) for group in optimizer.param_groups)  # ``add_param_group`` adds others
    if vars(optimizer).get(_CHECKED_ATTRIBUTE) == number:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    stale = [taken.description for p in parameters if (taken := find_replaced(p)) is not None]
    if stale:
        raise ConfigurationError(
            f"{type(optimizer).__name__} was built before fully_shard: {len(stale)} of its {len(parameters)} "
            f"parameters have been replaced by sharded ones, such as {stale[0]}, so that its step would change "
            "nothing. Build the optimizer after the last fully_shard call, or give this one the sharded parameters: "
            "composable_fsdp.rekey_optimizer(optimizer, model)."
        )
    unsharded = find_unsharded(parameters)
    if unsharded is not None:
        raise ConfigurationError(
            f"{type(optimizer).__name__} was built while parameters were unsharded, such as {unsharded.name!r}: "
            "between a forward and its backward, or after unshard(). Its step would change what is freed again. Build "
            "the optimizer before the first forward."
        )
    vars(optimizer)[_CHECKED_ATTRIBUTE] = number
    _warn_of_low_precision(optimizer, parameters)


def _check_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Raise if ``optimizer`` has no gradients, and some of its parameters have gradients that are not reduced yet."""
    if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
        return
    for p, state in _sharded_parameters(optimizer):
        found = find_parameter(p)
        if found is not None and state.group.gradients.holds(found):
            raise LifecycleError(
                f"{type(optimizer).__name__} has no gradients to step with: those of {found.name!r} are accumulated "
                "and not reduced: each backward was inside of no_sync or after set_requires_gradient_sync(False). "
                "Run the last backward before a step outside of no_sync, or drop them with model.zero_grad()."
            )


class LowPrecisionWarning(UserWarning):
    """An optimizer updates sharded parameters in bf16 or fp16 and keeps no fp32 copy of them."""


def _warn_of_low_precision(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
    """Warn once per process of low-precision updates by a class of ``torch.optim``.

    Other optimizers may keep an fp32 copy or round stochastically.

    Warns:
        LowPrecisionWarning: the optimizer updates bf16 or fp16 sharded parameters.
    """
    global _has_warned_of_low_precision
    if _has_warned_of_low_precision or not type(optimizer).__module__.startswith("torch.optim."):
        return
    dtypes = (torch.bfloat16, torch.float16)
    low = [p for p in parameters if isinstance(p, DTensor) and p.dtype in dtypes and p.requires_grad]
    first = next(filter(None, map(find_parameter, low)), None)
    if first is None:
        return
    _has_warned_of_low_precision = True
    dtype = str(first.dtype).removeprefix("torch.")
    warnings.warn(
        f"{type(optimizer).__name__} updates {len(low)} sharded parameters in {dtype}, such as {first.name!r}, and "
        "keeps no copy in fp32: updates smaller than the rounding of a parameter are lost. Leave parameters in fp32 "
        f"and compute in {dtype} with fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.{dtype})). If "
        "it is meant so, filter this composable_fsdp.LowPrecisionWarning.",
        LowPrecisionWarning,
        stacklevel=5,
    )
