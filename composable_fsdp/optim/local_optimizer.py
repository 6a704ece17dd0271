"""Optimizers that step on plain local shards instead of DTensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast
from weakref import ref

import torch
from torch.optim import Optimizer

from composable_fsdp.errors import ConfigurationError, LifecycleError
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
"""With all of their options but ``differentiable``. Not what derives from them, which may do anything."""

_NOT_ELEMENTWISE: dict[type[Optimizer], str] = {
    torch.optim.Adafactor: "takes means over rows, columns and whole parameters",
    torch.optim.LBFGS: "takes products and line searches over all parameters",
    torch.optim.Muon: "orthogonalises whole matrices",
    torch.optim.SparseAdam: "needs sparse gradients, which no sharded parameter has",
}


def local_optimizer(optimizer: OptimizerT, *, elementwise: bool = False) -> OptimizerT:
    """Lets ``optimizer`` update the local shards of its parameters as plain tensors.

    The results are the same to the bit, without the cost of DTensor operations, which is most of the step for small
    parameters. On a CPU, large shards are updated piece by piece, so that each is read and written once, and not once
    for every operation of the update.

    All else stays as it is: ``param_groups`` and ``state`` hold DTensors whenever anybody looks, in hooks and closures
    too, so that learning-rate schedulers, gradient scalers and ``torch.distributed.checkpoint`` see no difference.
    Plain parameters are updated as before, also in one group with sharded ones.

    A pickle or a copy of the optimizer is an ordinary one, with the same state.

    Args:
        optimizer: ASGD, Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop or SGD of ``torch.optim``,
            with any options but ``differentiable``.
        elementwise: the promise that an optimizer of another class is element-wise: what it does to an element depends
            on that element of parameter, gradient and state, and on numbers that are the same on every rank. Its state
            for a parameter must be a dict. Tensors in there of the shard's shape are taken for sharded like it.

    Returns:
        The same object. Keep it: its ``step`` alone does not keep it alive.

    Raises:
        ConfigurationError: the class is not element-wise, or not known to be; or the ``step`` of the object is not its
            class's any more.

    Example::

        optimizer = local_optimizer(torch.optim.AdamW(model.parameters()))
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    """
    _check(optimizer, elementwise)
    update = cast(Any, type(optimizer)).step.__wrapped__  # torch wraps the step of every class for its hooks
    hooked = Optimizer.profile_hook_step(_on_shards(update))
    # No cycle, which would keep the state alive until the next garbage collection.
    itself, name = ref(optimizer), type(optimizer).__name__

    @wraps(hooked)
    def step(*args: Any, **kwargs: Any) -> Any:
        this = itself()
        if this is None:
            raise LifecycleError(
                f"this step of {name} belongs to an object that is gone. Keep the optimizer, not only its step method."
            )
        return hooked(this, *args, **kwargs)

    cast(Any, step).__func__ = hooked  # learning-rate schedulers take it from what should be a bound method
    cast(Any, optimizer).step = step
    return optimizer


def _check(optimizer: Optimizer, elementwise: bool) -> None:
    kind = type(optimizer)
    reason = next((reason for base, reason in _NOT_ELEMENTWISE.items() if isinstance(optimizer, base)), None)
    if reason is not None:
        raise ConfigurationError(f"{kind.__name__} {reason}, so it cannot step on local shards. Use it as it is.")
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
    if "step" in vars(optimizer):
        raise ConfigurationError(
            f"the step of this {kind.__name__} has been replaced already, by a learning-rate scheduler or an earlier "
            "call. Call local_optimizer once, before anything else gets the optimizer."
        )


def _on_shards(update: Step) -> Step:
    """``update``, the step of an optimizer's class, with twins in the place of sharded parameters.

    The closure runs before that: it calls ``backward``, and ``zero_grad`` on the optimizer.
    """

    @wraps(update)
    def step(self: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        cuts = type(self) in ELEMENTWISE  # of whose state it is known what belongs to an element
        if closure is None:
            with local_copies_of(self, cuts=cuts):
                return update(self, **options)
        with torch.enable_grad():
            loss = closure()
        with local_copies_of(self, cuts=cuts):
            update(self, **options)
        return loss

    return step
