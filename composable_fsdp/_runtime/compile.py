"""All code that depends on Dynamo.

Hooks launch collectives and swap parameters, which a graph cannot contain. So a compiled model has a graph break at
each hook, and the code in between is compiled. Modules are marked as torch's own FSDP marks them. Dynamo then does not
treat parameters, whose storage size changes between calls, as constants of the graph.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from torch import nn
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
)

__all__ = ["DynamoDisabled", "calling_frame", "frame_of_call", "mark_managed"]

P = ParamSpec("P")
R = TypeVar("R")


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


def mark_managed(modules: Iterable[nn.Module]) -> None:
    """Tell Dynamo that the parameters of ``modules`` are swapped between calls."""
    for module in modules:
        vars(module).update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=True)


def calling_frame(depth: int = 2) -> FrameType:
    """Return the frame that called the caller's hook, skipping the frames of :class:`DynamoDisabled` and Dynamo."""
    frame = sys._getframe(depth)
    while frame.f_back is not None and (frame.f_code is _CODE or "_dynamo" in frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def frame_of_call(module: nn.Module) -> FrameType:
    """Return the frame that runs the call of ``module`` to which the current hook belongs.

    Other functions may be in between. If ``module`` is not being called, e.g. because the hook wraps a method, return
    the frame that called the hook.
    """
    caller = frame = calling_frame(3)
    while frame.f_back is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals["self"] is module:
            return frame
        frame = frame.f_back
    return caller
