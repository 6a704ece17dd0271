"""Optimizers that step on plain local shards instead of DTensors.

An element-wise update of a shard needs nothing but that shard, its gradient and its state, yet every operation on a
DTensor is dispatched in Python. So for the duration of the update each sharded parameter is stood in for by a *twin*: a
plain tensor of the same memory.

Invariant: outside of the update an optimizer holds sharded parameters only, and state of their shape as DTensors.
Nothing is kept from one step to the next, so that whatever replaces shards, gradients or state in between is followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from operator import methodcaller
from typing import Any, TypeVar, cast
from weakref import ref

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable_fsdp.errors import ConfigurationError, LifecycleError

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
    parameters. All else stays as it is: ``param_groups`` and ``state`` hold DTensors whenever anybody looks, in hooks
    and closures too, so that learning-rate schedulers, gradient scalers and ``torch.distributed.checkpoint`` see no
    difference. Plain parameters are updated as before, also in one group with sharded ones.

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
        if closure is None:
            with _twins(self):
                return update(self, **options)
        with torch.enable_grad():
            loss = closure()
        with _twins(self):
            update(self, **options)
        return loss

    return step


@contextmanager
def _twins(optimizer: Optimizer) -> Iterator[None]:
    """Twins for the sharded parameters that have a gradient, with local state; state that is new becomes DTensors."""
    groups, state = optimizer.param_groups, optimizer.state
    parameters = [group["params"] for group in groups]
    swapped = []
    try:
        for group in groups:
            group["params"] = params = list(group["params"])
            for index, parameter in enumerate(params):
                if _is_sharded(parameter):
                    twin, entry = _twin(parameter), _local_entry(state.get(parameter, {}))
                    if entry:
                        state[twin] = entry
                    swapped.append((parameter, twin, dict(entry)))
                    params[index] = twin
        yield
    finally:  # also of an update that failed halfway: what it has done by then is done
        for group, params in zip(groups, parameters, strict=True):
            group["params"] = params
        for parameter, twin, given in swapped:
            if twin in state:
                _take_over(state.pop(twin), given, state[parameter], parameter)
        # The memory knows that it has changed; this tells whoever looks at the DTensors.
        increment_version([parameter for parameter, *_ in swapped])


_IS_PARTIAL = methodcaller("is_partial")


def _is_sharded(parameter: torch.Tensor) -> bool:
    """Whether shards are all that its update needs. What is added to pending sums would count once per rank."""
    if not isinstance(parameter, DTensor) or not isinstance(parameter.grad, DTensor):
        return False
    return not any(map(_IS_PARTIAL, parameter.placements))


def _twin(parameter: Any) -> torch.Tensor:
    """A plain tensor in the memory of the local shard, with its gradient."""
    twin, gradient = _local(parameter).detach(), parameter.grad
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    if gradient.dtype != twin.dtype:
        twin.grad_dtype = gradient.dtype
    twin.grad = _local(gradient)
    return twin


def _local(tensor: Any) -> torch.Tensor:
    """The local tensor, with one dim if it has none: so its state differs in shape from a count of steps."""
    local: torch.Tensor = tensor._local_tensor
    return local if local.ndim else local.view(1)


def _local_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _local(value) if isinstance(value, DTensor) else value for name, value in entry.items()}


def _take_over(new: Mapping[str, Any], given: Mapping[str, Any], state: dict[str, Any], parameter: DTensor) -> None:
    """Brings ``state`` of ``parameter`` up to ``new``, which was ``given`` before. Most of it was changed in place."""
    for name, value in new.items():
        if name not in given or value is not given[name]:
            state[name] = _as_state(value, parameter)
    for name in [name for name in given if name not in new]:
        del state[name]


def _as_state(value: Any, parameter: Any) -> Any:
    """A tensor of the shard's shape as a DTensor like ``parameter``, in the same memory; anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.shape != _local(parameter).shape:
        return value
    return DTensor.from_local(
        value.detach().view(parameter._local_tensor.shape),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
