"""Checks of an optimizer before its step: its parameters, its gradients, and their precision; after it: its state."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.serialization import get_safe_globals, safe_globals

from composable_fsdp._core.hooks import sharded_parameters
from composable_fsdp._core.params import (
    find_parameter,
    find_replaced,
    find_unsharded,
    is_wrapper,
    local_part,
)
from composable_fsdp._core.seams import Observer
from composable_fsdp._extents import has_own_memory
from composable_fsdp.errors import ConfigurationError, LifecycleError, UnsavableStateWarning

_CHECKED_ATTRIBUTE = "_composable_fsdp_checked"
"""The attribute of checked optimizers with their number of parameters then. Copies and pickles do not have it."""

_CHECKED_STATE_ATTRIBUTE = "_composable_fsdp_checked_state"
"""The attribute with the number of parameters that had state when it was checked."""


class OptimizerChecks(Observer):
    """Refuses a step that would change nothing, or what is freed again. Warns of state that cannot be saved."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        _check_optimizer(optimizer)
        _check_gradients(optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        number = len(optimizer.state)
        if vars(optimizer).get(_CHECKED_STATE_ATTRIBUTE) != number:
            vars(optimizer)[_CHECKED_STATE_ATTRIBUTE] = number
            _warn_of_state_without_checkpoints(optimizer)


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
            "nothing. Build the optimizer after the last fully_shard call."
        )
    unsharded = find_unsharded(parameters)
    if unsharded is not None:
        raise ConfigurationError(
            f"{type(optimizer).__name__} was built while parameters were unsharded, such as {unsharded.name!r}: "
            "between a forward and its backward, or after unshard(). Its step would change what is freed again. Build "
            "the optimizer before the first forward."
        )
    vars(optimizer)[_CHECKED_ATTRIBUTE] = number


def _check_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Raise if ``optimizer`` has no gradients, and some of its parameters have gradients that are not reduced yet."""
    if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
        return
    states = dict.fromkeys(state for _, state in sharded_parameters(optimizer))
    held = {parameter.sharded: parameter for state in states for parameter in state.group.held_gradients()}
    first = next((held[p] for group in optimizer.param_groups for p in group["params"] if p in held), None)
    if first is not None:
        raise LifecycleError(
            f"{type(optimizer).__name__} has no gradients to step with: those of {first.name!r} are accumulated and "
            "not reduced: each backward was inside of no_sync or after set_requires_gradient_sync(False), or failed. "
            "Run the last backward before a step outside of no_sync, or drop them with model.zero_grad(); after a "
            "failure, call model.reset_iter_state() on all ranks."
        )


def _warn_of_state_without_checkpoints(optimizer: torch.optim.Optimizer) -> None:
    """Warn of state of tensor classes that ``checkpoint.save`` cannot save, once for each class.

    Warns:
        UnsavableStateWarning: the pickle of such a class cannot be loaded.
    """
    found = [
        (local, parameter, key)
        for parameter, entry in optimizer.state.items()
        for key, value in (entry.items() if isinstance(entry, Mapping) else ())
        if isinstance(value, torch.Tensor) and not has_own_memory(local := local_part(value))
    ]
    found.sort(key=lambda each: each[0].numel(), reverse=True)  # so that the smallest of each class is the last
    for kind, (local, parameter, key) in {type(each[0]): each for each in found}.items():
        if kind is FakeTensor:  # as plans have
            continue
        if reason := _why_not_saved(local):
            state = find_parameter(parameter)
            name = f"of shape {tuple(parameter.shape)}" if state is None else repr(state.name)
            warnings.warn(
                f"{type(optimizer).__name__} keeps {key!r} of parameter {name} as a {kind.__module__}."
                f"{kind.__qualname__}, so no checkpoint can be saved: {reason}.",
                UnsavableStateWarning,
                stacklevel=7,
            )


def _why_not_saved(local: torch.Tensor) -> str:
    if not is_wrapper(local):
        return "the class has __torch_dispatch__ and no __tensor_flatten__. Give it that and __tensor_unflatten__"
    return why_not_pickled(local)


def why_not_pickled(local: torch.Tensor) -> str:
    """Return why a wrapper cannot be pickled and loaded again, or an empty text."""
    try:
        torch.save(local, data := io.BytesIO())
        data.seek(0)
        inner = [type(getattr(local, name)) for name in cast(Any, local).__tensor_flatten__()[0]]
        known = get_safe_globals()  # safe_globals would take them away at its end
        with safe_globals([each for each in (type(local), *inner) if each not in known]):
            torch.load(data, weights_only=True)
    except Exception as error:  # the code of any class
        lines = str(error).splitlines() or [type(error).__name__]
        line = next((line for line in lines if "WeightsUnpickler" in line), lines[0]).strip()
        return (
            f"it cannot be pickled and loaded again ({line}). Keep only tensors, numbers and strings in the attributes "
            "of its class, or admit their classes with torch.serialization.add_safe_globals"
        )
    return ""
