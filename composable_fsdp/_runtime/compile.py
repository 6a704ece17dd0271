"""The only code that knows Dynamo.

Hooks talk to process groups and swap parameters: nothing that a graph could hold. So a compiled model has a graph break
at each of them, and what lies between is compiled. Modules are marked in the way that Dynamo knows from torch's own
FSDP, so that it does not take parameters, which change their size between calls, for constants of the graph.
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

__all__ = ["OutsideGraphs", "calling_frame", "frame_of_call", "mark_managed"]

P = ParamSpec("P")
R = TypeVar("R")


class OutsideGraphs(Generic[P, R]):
    """A callable that runs as it is, with all that it calls, never traced nor compiled.

    Dynamo compiles frames only while it has a callback in the interpreter. Between the graphs of a compiled function it
    has one, and is told to leave the callable alone; elsewhere the callable is called as it is.
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

    def __deepcopy__(self, memo: dict[int, Any]) -> OutsideGraphs[P, R]:
        """Of a copied module's hook: the method of the copy."""
        return OutsideGraphs(copy.deepcopy(self._function, memo))


# Dynamo heeds the mark where it meets the call in a graph. Called between graphs, this is a frame like any other, which
# it would compile once for all hooks and then mistake one of them for another: so it is told to skip it. This way of
# telling does not import Dynamo, which takes seconds.
cast(Any, OutsideGraphs.__call__)._torchdynamo_disable = True
set_code_exec_strategy(OutsideGraphs.__call__.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))


def mark_managed(modules: Iterable[nn.Module]) -> None:
    """Tells Dynamo that the parameters of ``modules`` come and go."""
    for module in modules:
        marked = cast(Any, module)
        marked._is_fsdp_managed_module = True
        marked._fsdp_use_orig_params = True


def calling_frame(depth: int = 2) -> FrameType:
    """The frame that called the hook that calls this, without those that :class:`OutsideGraphs` puts in between."""
    frame = sys._getframe(depth)
    while frame.f_back is not None and (
        frame.f_code is OutsideGraphs.__call__.__code__ or "_dynamo" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    return frame


def frame_of_call(module: nn.Module) -> FrameType:
    """The frame that runs the call of ``module`` for which a hook was called, maybe through functions of others.

    Where ``module`` is not being called, that of the function that called the hook, as it calls a method in its place.
    """
    caller = frame = calling_frame(3)
    while frame.f_back is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals["self"] is module:
            return frame
        frame = frame.f_back
    return caller
