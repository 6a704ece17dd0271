"""Explain errors of methods that use sharded parameters without a call of the module.

Only calls of a module unshard its parameters. A method that computes with sharded ones fails with an error of
``DTensor`` about mixed operands; public methods of sharded classes turn it into one that names the method and the
remedy.

Plain modules inside a sharded one run no code of this package. If such an error ends the program, ``sys.excepthook``
adds a note with the name of the sharded parameter, as long as there is a sharded model.

Rejected: code of the sharded parameters themselves, which would run wherever the error is caught. ``DTensor`` raises it
before it reads anything of ours. A ``__torch_function__`` or ``__torch_dispatch__``, in a subclass of ``DTensor`` or on
the parameter, sees no error of ``x @ weight.t()``, whose operand is a new ``DTensor``. It slows every step of an
optimizer (foreach AdamW of 48 small parameters on one rank: 10 to 30 percent of host time). Parameters of a subclass
fail torch's checks for ``type(p) is DTensor``; with the attribute on the parameter, ``copy.deepcopy`` and
``torch.save`` fail.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from composable_fsdp._runtime.groups.global_hooks import GlobalHooks
from composable_fsdp._runtime.groups.state import state_of, state_of_parameter
from composable_fsdp._runtime.params.sharded_param import find_parameter
from composable_fsdp.diagnostics._recording import hook_uncaught
from composable_fsdp.errors import LifecycleError

__all__ = ["explained_methods", "explanation_of", "uncaught_errors"]

_MIXED = "got mixed torch.Tensor and DTensor"


def explained_methods(original: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Return the public methods of ``original`` that ``nn.Module`` lacks, wrapped to explain errors."""
    methods: dict[str, Callable[..., Any]] = {}
    for base in original.__mro__[: original.__mro__.index(nn.Module)]:
        for name, value in vars(base).items():
            if isinstance(value, FunctionType) and not name.startswith("_") and not hasattr(nn.Module, name):
                methods.setdefault(name, _explaining(name, value))
    return methods


def _explaining(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        try:
            return original(self, *args, **kwargs)
        except RuntimeError as error:
            state = state_of(self)
            if isinstance(error, LifecycleError) or _MIXED not in str(error) or state.is_running:
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


def _explain(error: BaseException) -> str | None:
    """Add a note to an error about sharded parameters. Return its text where errors take no notes, in Python 3.10."""
    text = explanation_of(error)
    if text is None or not hasattr(error, "add_note"):
        return text
    if text not in getattr(error, "__notes__", ()):
        error.add_note(text)
    return None


uncaught_errors = GlobalHooks(lambda: hook_uncaught(_explain))
"""The ``sys.excepthook`` that explains errors about sharded parameters."""


def explanation_of(error: BaseException) -> str | None:
    """Return a text that names the sharded parameter an error of ``DTensor`` is about, or ``None`` for other errors.

    It is the first one found in the locals of the traceback, innermost frame first, or in a module among these locals.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, LifecycleError) or _MIXED not in str(error):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name != "<module>"]
    values = (value for frame in reversed(frames) for value in frame.f_locals.values())
    return next(filter(None, map(_explain_value, values)), None)


def _explain_value(value: object) -> str | None:
    """Return the explanation if ``value`` is a sharded parameter, or a module that has one of its own."""
    module = value if isinstance(value, nn.Module) else None
    for name, parameter in ({"": value} if module is None else module._parameters).items():
        found, state = find_parameter(parameter), state_of_parameter(parameter)
        if found is not None and found.sharded is parameter and state is not None:
            known = f"{name!r} of this {type(module).__name__.removeprefix('FSDP')}" if name else repr(found.name)
            return (
                f"parameter {known} is sharded, being in the group of {state.name!r} ({state.class_name}): only calls "
                "of that module bring it into memory. Call that module; or a method of it after "
                "composable_fsdp.register_fsdp_forward_method(module, name); or put module.unshard() before and "
                "module.reshard() after what computes with it."
            )
    return None
