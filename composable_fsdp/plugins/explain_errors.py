"""Explain errors of programs that use sharded parameters without a call of the module, or read the memory of a shard.

Only calls of a module unshard its parameters. A method that computes with sharded ones fails with an error of
``DTensor`` about mixed operands; public methods of sharded classes turn it into one that names the method and the
remedy.

Plain modules inside a sharded one run no code of this package. If such an error passes through the call of a sharded
module, or ends the program, the name of the sharded parameter is added to its text. The latter needs a
``sys.excepthook``, as long as there is a sharded model.

Rejected: code of the sharded parameters themselves, which would run wherever the error is caught. ``DTensor`` raises it
before it reads anything of ours. A ``__torch_function__`` or ``__torch_dispatch__``, in a subclass of ``DTensor`` or on
the parameter, sees no error of ``x @ weight.t()``, whose operand is a new ``DTensor``. It slows every step of an
optimizer (foreach AdamW of 48 small parameters on one rank: 10 to 30 percent of host time). Parameters of a subclass
fail torch's checks for ``type(p) is DTensor``; with the attribute on the parameter, ``copy.deepcopy`` and
``torch.save`` fail.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType, FunctionType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_fsdp._core.params import find_parameter, in_functional_call
from composable_fsdp._core.seams import HookHandles, ObservedRoot, Observer
from composable_fsdp._core.state import ForwardCall, FSDPState, GlobalHooks, state_of, state_of_parameter
from composable_fsdp.errors import LifecycleError

_MIXED = "got mixed torch.Tensor and DTensor"
_REMEDY = (
    "Call that module; or a method of it after composable_fsdp.register_fsdp_forward_method(module, name); or put "
    "module.unshard() before and module.reshard() after what computes with it."
)
_IN_STEP = (
    "An optimizer that computes with whole matrices: composable_fsdp.optim.owner_step(optimizer). One that is "
    "element-wise: composable_fsdp.local_optimizer(optimizer, elementwise=True)."
)
_NO_STORAGE = "invalid python storage"
_FULL_VALUES = (
    "On all ranks, take value.full_tensor() of it, or do this inside composable_fsdp.unsharded_params(model, "
    "writeback=False); composable_fsdp.checkpoint.save_safetensors writes shards as they are."
)


class ExplainedErrors(Observer):
    """Explains errors that leave the call of a sharded module, or end the program while there is a sharded model."""

    def after_sharding(self, state: FSDPState, modules: Mapping[nn.Module, HookHandles | None]) -> None:
        uncaught_errors.keep_for(state)

    def after_copy(self, state: FSDPState, clone: FSDPState) -> None:
        uncaught_errors.keep_for(clone)

    def raised(self, root: ObservedRoot, call: ForwardCall, error: BaseException) -> None:
        explain(error)


def is_mixed(error: BaseException) -> bool:
    """Return whether ``error`` is one of ``DTensor`` about plain operands."""
    return isinstance(error, RuntimeError) and not isinstance(error, LifecycleError) and _MIXED in str(error)


def explain(error: BaseException) -> None:
    """Add the explanation of an error about sharded parameters to its text."""
    try:
        text = explanation_of(error)
    except Exception:  # raised by objects of the program, such as a closed shelf in a local
        return
    if text is not None and not any(known in str(error) for known in (_REMEDY, _FULL_VALUES, _IN_STEP, text)):
        error.args = (f"{error}\n{text}",)


def explanation_of(error: BaseException) -> str | None:
    """Return a text that names the sharded parameter an error of torch is about, or ``None`` for other errors.

    It is the first one found in the lines of the traceback and in its locals, innermost frame first.
    """
    no_storage = isinstance(error, RuntimeError) and _NO_STORAGE in str(error)
    if not no_storage and not is_mixed(error):
        return None
    if in_functional_call() and not no_storage:
        return "If functional_call was given sharded values, give full ones: value.full_tensor(), called by all ranks."
    frames = list(traceback.walk_tb(error.__traceback__))
    values = [value for frame, line in reversed(frames) for value in _values_in(frame, line)]
    if no_storage:
        return _explain_storage(values)
    text = next(filter(None, map(_explain_value, values)), None)
    in_step = any(issubclass(type(frame.f_locals.get("self")), torch.optim.Optimizer) for frame, _ in frames)
    return text.replace(_REMEDY, _IN_STEP) if text and in_step else text


def _values_in(frame: FrameType, line: int) -> Iterator[object]:
    """Yield parameters that dotted names in a line of a frame stand for, then locals of functions."""
    for name in re.findall(r"[^\W\d]\w*(?:\.\w+)*", linecache.getline(frame.f_code.co_filename, line)):
        first, *attributes = name.split(".")
        value = frame.f_locals.get(first, frame.f_globals.get(first))
        for attribute in attributes:
            value = _attribute(value, attribute)
            if isinstance(value, nn.Parameter):
                yield value
    if frame.f_code.co_name != "<module>":
        yield from frame.f_locals.values()


def _attribute(value: object, name: str) -> object:
    """Return an attribute of ``value`` without running code of its class, or ``None``."""
    tables = [getattr(value, "__dict__", {})]
    if isinstance(value, nn.Module):
        tables += [value._parameters, value._modules]
    return next((table[name] for table in tables if name in table), None)


def _explain_storage(values: Iterable[object]) -> str | None:
    """Return the explanation for the first ``DTensor`` of ``values``, or in a mapping, one with a name first."""
    named = (pair for value in values for pair in (value.items() if isinstance(value, Mapping) else [("", value)]))
    shards = [(name, each) for name, each in named if isinstance(each, DTensor)]
    names = [name or getattr(find_parameter(each), "name", "") for name, each in shards]
    known = next(filter(None, names), None)
    if not shards:
        return None
    return (
        f"{'a tensor' if known is None else repr(known)} is a DTensor: this rank has only a shard of it, in no memory "
        f"that can be read as that of a full tensor. {_FULL_VALUES}"
    )


def _explain_value(value: object) -> str | None:
    """Return the explanation if ``value`` is a sharded parameter."""
    found, state = find_parameter(value), state_of_parameter(value)
    if found is None or found.sharded is not value or state is None:
        return None
    return (
        f"parameter {found.name!r} is sharded, being in the group of {state.name!r} ({state.class_name}): only calls "
        f"of that module bring it into memory. {_REMEDY}"
    )


# -- methods that compute with sharded parameters

_RUNS_LATER = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


def explained_methods(original: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Return the public methods of ``original`` that ``nn.Module`` lacks, wrapped to explain errors.

    Coroutines and generators stay, since programs ask for their kind, and they run after the call.
    """
    names = (name for name in dir(original) if not name.startswith("_") and not hasattr(nn.Module, name))
    members = ((name, inspect.getattr_static(original, name)) for name in names)
    return {
        name: _explaining(name, value)
        for name, value in members
        if isinstance(value, FunctionType) and not value.__code__.co_flags & _RUNS_LATER
    }


def _explaining(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        try:
            return original(self, *args, **kwargs)
        except RuntimeError as error:
            state = state_of(self)
            if isinstance(error, LifecycleError) or not is_mixed(error) or state.is_running:
                raise
            held = next((f", such as {parameter.name!r}" for parameter in state.group.parameters), "")
            raise LifecycleError(
                f"{name}() of {state.class_name} computed with parameters that are sharded{held}: only calls of the "
                f"module {state.name!r} itself bring them into memory. After fully_shard, call "
                f"composable_fsdp.register_fsdp_forward_method(module, {name!r}); or put module.unshard() before it "
                "and module.reshard() after it."
            ) from error

    return method


# -- errors that end the program


def _hook_uncaught() -> Callable[[], None]:
    """Install a ``sys.excepthook`` that explains uncaught errors and calls the one before. Return what restores it."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, stack: TracebackType | None) -> None:
        explain(error)
        before(kind, error, stack)

    def restore() -> None:
        if sys.excepthook is hook:  # otherwise another hook may call this one
            sys.excepthook = before

    sys.excepthook = hook
    return restore


uncaught_errors = GlobalHooks(_hook_uncaught)
"""The ``sys.excepthook`` that explains errors about sharded parameters."""
