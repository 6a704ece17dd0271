"""The context of a caller: modes, transforms and autocast. The work of this library runs outside of it.

A caller may run a model in a transform of ``torch.func``, in a ``TorchDispatchMode`` such as that of selective
activation checkpointing, in a ``TorchFunctionMode`` such as a default device, or in autocast. Gathers, reductions,
checks and copies are not part of what the model computes: a transform would wrap their tensors, a mode would record or
replay them as operations of the model, and autocast would change their dtypes. So every entrance leaves this context:
the hooks of modules, autograd, optimizers and state dicts, ``fully_shard``, and the methods of sharded modules. What
these call runs outside too, such as hooks of tensor subclasses, custom collectives and codecs. Views and casts of
inputs and outputs are part of the computation, and stay inside.

Three kinds of dispatch modes are not left:

- infra modes, as torch calls those for tensors without values and for tracing: the library's tensors are of that kind
- modes of ``torch.distributed`` and of this package, which count the memory or the collectives of sharding
- modes whose class has the attribute ``observes_sharding = True``

A subclass is of the kind of its base. The default dtype is one for all threads, so it is not changed: the library names
the dtype of every tensor that it makes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

__all__ = [
    "LEFT_CONTEXTS",
    "dispatch_modes",
    "function_modes",
    "in_autocast",
    "in_transform",
    "outside_callers_context",
    "runs_outside",
]

LEFT_CONTEXTS: list[Callable[[], AbstractContextManager[None]]] = []
"""Leave contexts of other packages. While a root is in one, an observer of ``before_hook`` must be attached to it."""

P = ParamSpec("P")
R = TypeVar("R")

_C: Any = torch._C
dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack
function_modes: Callable[[], int] = _C._len_torch_function_stack
in_transform: Callable[[], bool] = _C._are_functorch_transforms_active
in_autocast: Callable[[], bool] = _C._is_any_autocast_enabled


def runs_outside(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function``, which runs outside of the caller's context."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with outside_callers_context():
            return function(*args, **kwargs)

    return run


@contextmanager
def outside_callers_context() -> Iterator[None]:
    """Leave the caller's context, in this thread, until the end of the block."""
    with ExitStack() as left:
        for leave in LEFT_CONTEXTS:
            left.enter_context(leave())
        if in_transform():
            left.enter_context(_C._DisableFuncTorch())
        if in_autocast():
            left.enter_context(_C._DisableAutocast())
        if dispatch_modes():
            _leave_dispatch_modes(left)
        for _ in range(function_modes()):
            left.callback(_C._push_on_torch_function_stack, _C._pop_torch_function_stack())
        yield


def _leave_dispatch_modes(left: ExitStack) -> None:
    """Take the caller's modes off the stack until ``left`` ends."""
    modes: list[Any] = _get_current_dispatch_mode_stack()
    stay = [_stays(type(mode)) for mode in modes]
    if all(stay):
        return
    first = stay.index(False)
    for _ in modes[first:]:
        left.callback(_push_mode, cast(Any, _pop_mode)())
    for mode in itertools.compress(modes[first:], stay[first:]):
        _push_mode(mode)
        left.callback(_pop_mode)


def _stays(kind: Any) -> bool:
    """Return whether modes of the class ``kind`` see what the library does."""
    places = [f"{base.__module__}." for base in kind.__mro__]
    is_ours = any(place.startswith(("torch.distributed.", "composable_fsdp.")) for place in places)
    return is_ours or kind.is_infra_mode() or bool(getattr(kind, "observes_sharding", False))
