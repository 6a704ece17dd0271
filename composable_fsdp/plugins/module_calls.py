"""Calls of sharded modules: one that has no hooks but ours runs them without torch's loops over hooks.

Torch's loops take 7 % of the host time of a group of one small parameter and 4 % with four (docs/benchmarks.md). No
accelerator has run these calls, so they are on for modules that compute on the host.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MethodType
from typing import Any, cast

import torch
from torch import nn
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
)

from composable_fsdp._core.hooks import (
    HOOKED_FORWARD,
    abort_call,
    begin_call,
    call_as_forward,
    finish_call,
    take_inputs,
)
from composable_fsdp._core.memory import is_host
from composable_fsdp._core.seams import HookHandles, Observer
from composable_fsdp._core.state import FSDPState, ModuleReference, state_of
from composable_fsdp.errors import ConfigurationError

_HOOKS_ATTRIBUTE = "_composable_fsdp_hooks"
"""The attribute of sharded modules with the ids of our two hooks. A copied module has hooks with the same ids."""
_KINDS = "forward_pre", "forward", "backward_pre", "backward"
_torch_call = nn.Module._call_impl
_of_all_modules = [vars(torch.nn.modules.module)[f"_global_{kind}_hooks"] for kind in _KINDS]


def direct_calls(original: type[nn.Module]) -> Mapping[str, Callable[..., Any]]:
    """Return the ``_call_impl`` of the sharded class of ``original``, unless that has one of its own."""
    return {"_call_impl": _call_impl} if original._call_impl is _torch_call else {}


def _call_impl(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the module as torch does, with our hooks if there are no others, and nothing traces or replaces the call."""
    space = self.__dict__
    hooks, pre_hooks, post_hooks = space.get(_HOOKS_ATTRIBUTE), space["_forward_pre_hooks"], space["_forward_hooks"]
    if (
        hooks is None
        or hooks[0] not in pre_hooks
        or hooks[1] not in post_hooks
        or len(pre_hooks) + len(post_hooks) > len(hooks)
        or space["_backward_pre_hooks"]
        or space["_backward_hooks"]
        or any(_of_all_modules)
        or get_eval_frame_callback() is not None
        or torch._C._get_tracing_state() is not None
        or nn.Module._call_impl is not _torch_call
    ):
        return nn.Module._call_impl(self, *args, **kwargs)
    state = state_of(self)
    call = begin_call(state, sys._getframe())
    try:
        if not call.is_inner:
            call.root.pre_forward(call)
        args, kwargs = take_inputs(call, args, kwargs)
        forward = type(self).forward
        if "forward" in space or getattr(forward, "__code__", None) is not HOOKED_FORWARD:  # a user has replaced it
            output = self.forward(*args, **kwargs)
        else:
            output = cast(Any, forward).__wrapped__(self, *args, **kwargs)
    except Exception:
        abort_call(state)
        raise
    return finish_call(state, self, output)


set_code_exec_strategy(_call_impl.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))


class OwnHooks(Observer):
    """Notes which hooks of a module are ours, for modules that compute on the host."""

    def after_sharding(self, state: FSDPState, modules: Mapping[nn.Module, HookHandles | None]) -> None:
        for module, handles in modules.items():
            if handles is not None and is_host(state.group.axes.device):
                vars(module)[_HOOKS_ATTRIBUTE] = handles.pre_forward.id, handles.post_forward.id


# -- Methods that are called as ``forward`` is


def wrap_forward_method(state: FSDPState, module: nn.Module, method_name: str) -> None:
    """Make a method of the module unshard and reshard as ``forward`` does."""
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ConfigurationError(f"{type(module).__name__} has no method {method_name!r} to register.")

    setattr(module, method_name, _ForwardMethod(state, module, method))


class _ForwardMethod:
    """Calls ``method`` with unsharded parameters. A deep copy calls the method of the copied module.

    ``module`` owns this object and not the reverse, so of a bound method only the function is kept.
    """

    def __init__(self, state: FSDPState, module: nn.Module, method: Callable[..., Any]) -> None:
        self._state = state
        self._module = ModuleReference(module)
        self._is_bound = getattr(method, "__self__", None) is module
        self._method = cast(MethodType, method).__func__ if self._is_bound else method
        functools.update_wrapper(self, self._method)
        with suppress(TypeError, ValueError):  # some builtins have no signature
            vars(self)["__signature__"] = inspect.signature(method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        method = MethodType(self._method, module) if self._is_bound else self._method
        return call_as_forward(self._state, module, method, args, kwargs)
