"""The context of the caller, which hooks leave: autocast, dispatch modes, and transforms of torch.func."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

LEFT_CONTEXTS: list[Callable[[], AbstractContextManager[None]]] = []
"""Leave contexts of other packages, each of which has a mode of torch: hooks leave nothing if there is no mode."""

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


def runs_unseen(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function``, a check of the library, which no mode of the caller or of torch's tools sees."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with ExitStack() as left:
            if dispatch_modes():
                _leave_dispatch_modes(left, lambda kind: bool(kind.is_infra_mode()))
            return function(*args, **kwargs)

    return run


@contextmanager
def outside_callers_context() -> Iterator[None]:
    """Leave the caller's context, in this thread, until the end of the block."""
    with ExitStack() as left:
        # Contexts of other packages, then of torch.func, autocast, dispatch modes and function modes.
        for leave in LEFT_CONTEXTS:
            left.enter_context(leave())
        if in_transform():
            left.enter_context(_C._DisableFuncTorch())
        if in_autocast():
            left.enter_context(_C._DisableAutocast())
        if dispatch_modes():
            _leave_dispatch_modes(left, _stays)
        for _ in range(function_modes()):
            left.callback(_C._push_on_torch_function_stack, _C._pop_torch_function_stack())
        yield


def _leave_dispatch_modes(left: ExitStack, stays: Callable[[Any], bool]) -> None:
    """Take the modes off the stack whose classes do not stay, until ``left`` ends."""
    modes: list[Any] = _get_current_dispatch_mode_stack()
    stay = [stays(type(mode)) for mode in modes]
    if all(stay):
        return
    # Pop all modes above the first that goes, and push again those that stay.
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


_functorch: Any = torch._C._functorch
dual_numbers: Any = forward_ad
"""The module with the level of dual numbers, ``_current_level``, which is -1 outside of one."""


def layers_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return ``tensor``, its tangents, and the tensors that any of them wraps, of all levels."""
    return [tensor, *_inside(tensor)]


def _inside(tensor: torch.Tensor) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    # Tangents of forward-mode can be read at this level only.
    top = _functorch.peek_interpreter_stack()
    if forward_ad._current_level >= 0 and (top is None or top.key() == _functorch.TransformType.Jvp):
        tangent = forward_ad.unpack_dual(tensor).tangent
        if tangent is not None:
            found += layers_of(tangent)
    # A plain tensor wraps nothing.
    if not _functorch.is_functorch_wrapped_tensor(tensor):
        return found
    if top is None or top.level() < _functorch.maybe_get_level(tensor):  # its level has ended, as for a vjp function
        return found + layers_of(_functorch.get_unwrapped(tensor))
    level = top.level()
    left = _functorch.pop_dynamic_layer_stack()  # tangents of the level outside can only be read there
    try:
        is_of_level = _functorch.maybe_get_level(tensor) == level
        return found + (layers_of(_functorch.get_unwrapped(tensor)) if is_of_level else _inside(tensor))
    finally:
        _functorch.push_dynamic_layer_stack(left)
