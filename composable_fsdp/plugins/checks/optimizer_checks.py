"""Checks of an optimizer before its step: its parameters, its gradients, and their precision."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from composable_fsdp._core.events import GradientState
from composable_fsdp._core.group import ParamGroup
from composable_fsdp._core.hooks import sharded_parameters
from composable_fsdp._core.params import ShardedParameter, find_parameter, find_replaced, find_unsharded
from composable_fsdp._core.seams import Observer
from composable_fsdp.errors import ConfigurationError, LifecycleError, LowPrecisionWarning

_has_warned_of_low_precision = False
_CHECKED_ATTRIBUTE = "_composable_fsdp_checked"
"""The attribute of checked optimizers with their number of parameters then. Copies and pickles do not have it."""


class OptimizerChecks(Observer):
    """Refuses a step that would change nothing, or what is freed again."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        _check_optimizer(optimizer)
        _check_gradients(optimizer)


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
    _warn_of_low_precision(optimizer, parameters)


def _check_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Raise if ``optimizer`` has no gradients, and some of its parameters have gradients that are not reduced yet."""
    if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
        return
    for p, state in sharded_parameters(optimizer):
        found = find_parameter(p)
        if found is not None and _holds_gradient_of(state.group, found):
            raise LifecycleError(
                f"{type(optimizer).__name__} has no gradients to step with: those of {found.name!r} are accumulated "
                "and not reduced: each backward was inside of no_sync or after set_requires_gradient_sync(False), or "
                "failed. Run the last backward before a step outside of no_sync, or drop them with model.zero_grad(); "
                "after a failure, call model.reset_iter_state() on all ranks."
            )


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
        "it is meant so, filter this composable_fsdp.errors.LowPrecisionWarning.",
        LowPrecisionWarning,
        stacklevel=7,
    )


def _holds_gradient_of(group: ParamGroup, parameter: ShardedParameter) -> bool:
    """Return whether ``parameter`` has a gradient that is not in its sharded one yet, after a backward."""
    if group.gradient_state is GradientState.PARTIAL:
        return parameter.trainable
    own = parameter.accumulated is not None or parameter.unsharded.grad is not None
    return group.gradient_state is GradientState.LOCAL and own
