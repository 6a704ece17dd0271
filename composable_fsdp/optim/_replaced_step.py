"""Replacing the ``step`` of single optimizers: what the calls that change a step share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim import Optimizer

from composable_fsdp._core.hooks import wrapped_hook
from composable_fsdp.errors import ConfigurationError, LifecycleError

Step = Callable[..., Any]


def class_step(optimizer: Optimizer) -> Step:
    """Return the step of the optimizer's class without hooks. Torch wraps the step of every class for its hooks."""
    return cast(Step, cast(Any, type(optimizer)).step.__wrapped__)


_unasked: WeakKeyDictionary[Callable[..., Any], Step | None] = WeakKeyDictionary()
"""The steps that no call of the user has put in, with the scheduler's step that each has replaced, if there was one."""


_HOOKED = cast(Any, Optimizer.profile_hook_step(print)).__code__
"""The code of torch's function around the steps of all classes."""


def is_torch_step(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer.step`` is torch's own method, or that in a scheduler's function that counts calls."""
    of_class: Any = cast(Any, type(optimizer)).step
    replaced: Any = vars(optimizer).get("step")
    by_scheduler = hasattr(replaced, "_wrapped_by_lr_sched") and getattr(replaced, "__wrapped__", None) is of_class
    is_hooked = getattr(of_class, "__code__", None) is _HOOKED
    return is_hooked and of_class.__wrapped__.__module__.startswith("torch.optim.") and (by_scheduler or not replaced)


def restore_step(optimizer: Optimizer) -> None:
    """Put back the step that was there before :func:`replace_step` with ``unasked``, if that was the last change."""
    replaced: Any = vars(optimizer).get("step")
    if replaced in _unasked:
        before = _unasked[replaced]
        if before is None:
            del vars(optimizer)["step"]
        else:
            vars(optimizer)["step"] = before


def update_of(optimizer: Optimizer, call: str) -> Step:
    """Return the step without hooks, for ``call`` to replace it.

    Raises:
        ConfigurationError: it has been replaced before ``call``, the name of a function, does.
    """
    restore_step(optimizer)
    if "step" in vars(optimizer):
        raise ConfigurationError(
            f"the step of this {type(optimizer).__name__} has been replaced already, by a learning-rate scheduler, "
            f"another library or an earlier call. Call {call} once, before anything else gets the optimizer."
        )
    return class_step(optimizer)


def replace_step(optimizer: Optimizer, update: Step, *, unasked: bool = False) -> None:
    """Replace ``optimizer.step`` by ``update``, which takes the optimizer first. Hooks run around it as before.

    Dynamo runs it uncompiled, since it cannot trace a sharded parameter.

    Args:
        optimizer: the object whose ``step`` is replaced.
        update: a step without hooks.
        unasked: the user did not ask for it, so it gives way to any later change of the step, of object or class.
    """
    hooked = wrapped_hook(Optimizer.profile_hook_step(update))
    # A reference cycle would keep the state alive until the next garbage collection.
    itself, kind = ref(optimizer), cast(Any, type(optimizer))
    of_class, before = kind.step, cast(Any, vars(optimizer).get("step") if unasked else None)

    @wraps(before or of_class)
    def step_of(this: Any, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            this._opt_called = True  # as the scheduler's function does, which it warns of otherwise
        if unasked and kind.step is not of_class:  # a tool has replaced that of all objects
            restore_step(this)
            return kind.step(this, *args, **kwargs)  # not this.step: a scheduler's function may call this one
        return hooked(this, *args, **kwargs)

    @wraps(step_of)
    def step(*args: Any, **kwargs: Any) -> Any:
        this = itself()
        if this is None:
            raise LifecycleError(
                f"this step of {kind.__name__} belongs to an object that is gone. Keep the optimizer, not only its "
                "step method."
            )
        return step_of(this, *args, **kwargs)

    if unasked:
        _unasked[step] = before
    cast(Any, step).__func__ = step_of  # learning-rate schedulers read it: they expect a bound method
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
