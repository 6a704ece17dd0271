"""Optimizers that step on plain local shards instead of DTensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim import Optimizer

from composable_fsdp.errors import ArgumentTypeError, ConfigurationError, LifecycleError
from composable_fsdp.optim._local_step import local_copies_of

__all__ = ["ELEMENTWISE", "local_optimizer"]

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)
Step = Callable[..., Any]

ELEMENTWISE = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""The element-wise optimizers, with any options but ``differentiable``. Subclasses are not among them."""

_NOT_ELEMENTWISE: dict[type[Optimizer], str] = {
    torch.optim.Adafactor: "takes means over rows, columns and whole parameters",
    torch.optim.LBFGS: "takes products and line searches over all parameters",
    torch.optim.Muon: "orthogonalises whole matrices",
    torch.optim.SparseAdam: "needs sparse gradients, which no sharded parameter has",
}


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
    replace_step(optimizer, _on_shards(class_step(optimizer)))
    return optimizer


def class_step(optimizer: Optimizer) -> Step:
    """Return the step of the optimizer's class without hooks. Torch wraps the step of every class for its hooks."""
    return cast(Step, cast(Any, type(optimizer)).step.__wrapped__)


_updates: WeakKeyDictionary[Callable[..., Any], Step] = WeakKeyDictionary()
"""The functions that the steps of single objects call, without hooks."""


def update_of(optimizer: Optimizer, call: str) -> Step:
    """Return the step without hooks: that of the class, or what another call has replaced it by before ``call`` does.

    Raises:
        ConfigurationError: somebody else has replaced it.
    """
    replaced = vars(optimizer).get("step")
    if replaced is None:
        return class_step(optimizer)
    if replaced not in _updates:
        raise ConfigurationError(
            f"the step of this {type(optimizer).__name__} has been replaced already, by a learning-rate scheduler or "
            f"another library. Call {call} before anything else gets the optimizer."
        )
    return _updates[replaced]


def replace_step(optimizer: Optimizer, step_of: Step) -> None:
    """Replace ``optimizer.step`` by ``step_of``, which takes the optimizer first. Hooks run around it as before."""
    hooked = Optimizer.profile_hook_step(step_of)
    # A reference cycle would keep the state alive until the next garbage collection.
    itself, name = ref(optimizer), type(optimizer).__name__

    @wraps(hooked)
    def step(*args: Any, **kwargs: Any) -> Any:
        this = itself()
        if this is None:
            raise LifecycleError(
                f"this step of {name} belongs to an object that is gone. Keep the optimizer, not only its step method."
            )
        return hooked(this, *args, **kwargs)

    _updates[step] = step_of
    cast(Any, step).__func__ = hooked  # learning-rate schedulers read it: they expect a bound method
    cast(Any, optimizer).step = step


def with_closure(update: Step, carry_out: Step) -> Step:
    """Return a step like ``update`` that calls its closure, then ``carry_out(optimizer, **options)``.

    The closure calls ``backward``, and ``zero_grad`` on the optimizer, so it comes before parameters are replaced.
    """

    @wraps(update)
    def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        if closure is None:
            return carry_out(optimizer, **options)
        with torch.enable_grad():
            loss = closure()
        carry_out(optimizer, **options)
        return loss

    return step


def check_step(optimizer: Optimizer, call: str) -> None:
    """Raise if the step of ``optimizer`` has been replaced before ``call`` replaces it."""
    if "step" in vars(optimizer):
        raise ConfigurationError(
            f"the step of this {type(optimizer).__name__} has been replaced already, by a learning-rate scheduler or "
            f"an earlier call. Call {call} once, before anything else gets the optimizer."
        )


def _check(optimizer: Optimizer, elementwise: bool) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(f"local_optimizer takes an optimizer, such as torch.optim.SGD(...), not {optimizer!r}.")
    kind = type(optimizer)
    reason = next((reason for base, reason in _NOT_ELEMENTWISE.items() if isinstance(optimizer, base)), None)
    if reason is not None:
        raise ConfigurationError(
            f"{kind.__name__} {reason}, so it cannot step on local shards. Use it as it is; if it needs no more than "
            "whole parameters, as Adafactor and Muon do, pass it to owner_step."
        )
    if kind not in ELEMENTWISE and not elementwise:
        raise ConfigurationError(
            f"{kind.__name__} is not known to be element-wise. If what it does to an element depends on no other "
            "element, pass elementwise=True; otherwise use it as it is."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigurationError(
            f"{kind.__name__} was made with differentiable=True, but what happens to local shards is not on autograd's "
            "graph. Use it as it is."
        )
    check_step(optimizer, "local_optimizer")


def _on_shards(update: Step) -> Step:
    """Return ``update``, the step of an optimizer's class, with local copies in place of sharded parameters."""

    def carry_out(optimizer: Optimizer, **options: Any) -> Any:
        with local_copies_of(optimizer):
            return update(optimizer, **options)

    return with_closure(update, carry_out)
