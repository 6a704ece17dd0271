"""Dynamo, the frontend of ``torch.compile``: it traces and compiles no hooks, and knows which modules are sharded."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from torch import nn
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
)

from composable_fsdp._core.hooks import sharded_parameters
from composable_fsdp._core.params import find_parameter, local_part
from composable_fsdp._core.seams import HOOK_FRAMES, HookHandles, Observer
from composable_fsdp._core.state import FSDPState
from composable_fsdp.errors import ConfigurationError

P = ParamSpec("P")
R = TypeVar("R")

_DISABLED: set[CodeType] = set()
"""The code of functions of ``torch.compiler.disable``."""


class DynamoDisabled(Generic[P, R]):
    """A callable that Dynamo neither traces nor compiles, with all that it calls.

    Dynamo compiles frames only while the interpreter has its callback, e.g. between the graphs of a compiled function.
    Then the callable is called through ``torch.compiler.disable``, otherwise directly.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        self._function = function
        self._disabled: Callable[P, R] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if get_eval_frame_callback() is None:
            return self._function(*args, **kwargs)
        if self._disabled is None:
            self._disabled = torch.compiler.disable(self._function, recursive=True)
            _DISABLED.add(cast(Any, self._disabled).__code__)
            HOOK_FRAMES.update(_DISABLED)
        return self._disabled(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> DynamoDisabled[P, R]:
        """Copy the function too: the hook of a copied module is a method of the copy."""
        return DynamoDisabled(copy.deepcopy(self._function, memo))


# ``_torchdynamo_disable`` works where Dynamo meets the call in a graph. Between graphs, Dynamo would compile this frame
# once for all hooks and mistake one hook for another, so it must skip the frame. ``set_code_exec_strategy`` does that
# without importing Dynamo, which takes seconds.
cast(Any, DynamoDisabled.__call__)._torchdynamo_disable = True
_CODE = DynamoDisabled.__call__.__code__
set_code_exec_strategy(_CODE, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
HOOK_FRAMES.add(_CODE)


class ManagedModules(Observer):
    """Tells Dynamo that the parameters of sharded modules are swapped between calls. Refuses steps it cannot trace."""

    def after_sharding(self, state: FSDPState, modules: Mapping[nn.Module, HookHandles | None]) -> None:
        for module in modules:
            for each in module.modules():
                vars(each).update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=True)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a compiled step of parameters that Dynamo cannot trace, before it fails without their names.

        Raises:
            ConfigurationError: the local shard of a parameter does not begin where its storage does.
        """
        if sys._getframe(2).f_code not in _DISABLED or "step" in vars(optimizer):
            return
        for parameter, _ in sharded_parameters(optimizer):
            if parameter.storage_offset() != local_part(parameter).storage_offset():
                kind, name = type(optimizer).__name__, find_parameter(parameter)
                raise ConfigurationError(
                    f"torch.compile cannot trace the step of this {kind}: parameter {name and name.name!r} is a part "
                    "of the flat shard of its group. Call optimizer.step() itself. From its second step on, or at once "
                    "after composable_fsdp.local_optimizer(optimizer), it is as fast as on plain tensors."
                )
