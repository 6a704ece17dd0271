"""Optimizers that step on plain local shards instead of DTensors."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from composable_fsdp._core.hooks import sharded_parameters
from composable_fsdp._core.memory import is_host
from composable_fsdp._core.params import local_part
from composable_fsdp._core.seams import Observer
from composable_fsdp.errors import ArgumentTypeError, ConfigurationError
from composable_fsdp.optim._local_step import local_copies_of
from composable_fsdp.optim._replaced_step import Step, class_step, is_torch_step, replace_step, update_of, with_closure

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

_NAMES = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
ELEMENTWISE = frozenset(getattr(torch.optim, name) for name in _NAMES)
"""The element-wise optimizers, with any options but ``differentiable``. Subclasses are not among them."""

_NOT_ELEMENTWISE = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon, torch.optim.SparseAdam)


def local_optimizer(optimizer: OptimizerT, *, elementwise: bool = False) -> OptimizerT:
    """Make ``optimizer`` update the local shards of its parameters as plain tensors.

    The results are bitwise identical, without the overhead of DTensor operations, which dominates the step for small
    parameters. Of large ones on a CPU, an optimizer with ``fused=True`` reads and writes each shard once.

    All else is unchanged: ``param_groups`` and ``state`` hold DTensors at all other times, also in hooks and closures,
    so learning-rate schedulers, gradient scalers and ``torch.distributed.checkpoint`` see no difference. Plain
    parameters are updated as before, also in one group with sharded ones.

    A pickle or a copy of the optimizer is an ordinary optimizer with the same state.

    Args:
        optimizer: ASGD, Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop or SGD of ``torch.optim``,
            with any options but ``differentiable``.
        elementwise: asserts that an optimizer of another class is element-wise: its update of an element depends on
            that element of parameter, gradient and state, and on numbers that are the same on every rank. Its state for
            a parameter must be a dict. State tensors of the shard's shape are treated as sharded like the parameter.

    Returns:
        The same object. Keep it: its ``step`` alone does not keep it alive.

    Raises:
        ConfigurationError: the class is not element-wise, or not known to be; or the ``step`` of the object has been
            replaced already.

    Example::

        optimizer = local_optimizer(torch.optim.AdamW(model.parameters()))
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    """
    _check(optimizer, elementwise)
    replace_step(optimizer, on_shards(update_of(optimizer, "local_optimizer")))
    return optimizer


def _check(optimizer: Optimizer, elementwise: bool) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(f"local_optimizer takes an optimizer, such as torch.optim.SGD(...), not {optimizer!r}.")
    kind = type(optimizer)
    if isinstance(optimizer, _NOT_ELEMENTWISE) or not (elementwise or kind in ELEMENTWISE):
        raise ConfigurationError(
            f"{kind.__name__} is not element-wise, or not known to be. If it needs whole parameters, as Adafactor and "
            "Muon do, pass it to owner_step. If what it does to an element depends on no other element, pass "
            "elementwise=True. Otherwise use it as it is."
        )
    if _is_differentiable(optimizer):
        raise ConfigurationError(
            f"{kind.__name__} was made with differentiable=True, but what happens to local shards is not on autograd's "
            "graph. Use it as it is."
        )


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether ``local_optimizer`` takes ``optimizer`` without ``elementwise``."""
    return type(optimizer) in ELEMENTWISE and not _is_differentiable(optimizer)


def _is_differentiable(optimizer: Optimizer) -> bool:
    return any(group.get("differentiable") for group in optimizer.param_groups)


def on_shards(update: Step, *, unasked: bool = False) -> Step:
    """Return ``update``, the step of an optimizer's class, with local copies in place of sharded parameters."""

    def carry_out(optimizer: Optimizer, **options: Any) -> Any:
        if unasked and not _are_on:
            return update(optimizer, **options)
        with local_copies_of(optimizer):
            return update(optimizer, **options)

    return with_closure(update, carry_out)


# -- without being asked

_are_on: bool = True
_SEEN_ATTRIBUTE = "_composable_fsdp_seen"
"""The attribute of optimizers whose step was replaced, or is not to be. Copies and pickles do not have it."""


def set_local_steps(enabled: bool) -> None:
    """Choose whether torch's optimizers step on local shards by themselves, from their second step on.

    They do by default if all of their sharded parameters are in host memory. The optimizers are those that
    ``local_optimizer`` takes without ``elementwise``. Results and state are bitwise the same.

    Args:
        enabled: False makes all of them step on DTensors again, those too that have stepped on local shards. Those of
            ``local_optimizer`` stay as they are.
    """
    global _are_on
    _are_on = enabled


class LocalSteps(Observer):
    """Makes torch's element-wise optimizers step on local shards. The first step makes the state, on DTensors.

    A pair of hooks around the step would not do: torch skips those after a step that raises, and the parameters would
    stay replaced.
    """

    def before_step(self, optimizer: Optimizer) -> None:
        if _are_on and type(optimizer) in ELEMENTWISE and _SEEN_ATTRIBUTE not in vars(optimizer):
            vars(optimizer)[_SEEN_ATTRIBUTE] = True
            sharded = [local_part(parameter) for parameter, _ in sharded_parameters(optimizer)]
            on_host = bool(sharded) and all(is_host(shard.device) for shard in sharded)
            if on_host and is_torch_step(optimizer) and is_elementwise(optimizer):
                replace_step(optimizer, on_shards(class_step(optimizer), unasked=True), unasked=True)
