"""Explain errors of methods that use sharded parameters without a call of the module.

Only calls of a module unshard its parameters. A method that computes with sharded ones fails with an error of
``DTensor`` about mixed operands; public methods of sharded classes turn it into one that names the method and the
remedy.

Plain modules inside a sharded one run no code of this package. If such an error passes through the call of a sharded
module, or ends the program, a note with the name of the sharded parameter is added to it. The latter needs a
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
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from composable_fsdp._consistency.watchdog import note_end
from composable_fsdp._runtime.groups.global_hooks import GlobalHooks
from composable_fsdp._runtime.groups.state import state_of
from composable_fsdp.diagnostics._recording import hook_uncaught
from composable_fsdp.errors import LifecycleError

__all__ = ["explained_methods", "uncaught_errors"]


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
            from composable_fsdp.plugins.explain_errors import is_mixed

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


def _note_and_explain(error: BaseException) -> str | None:
    from composable_fsdp.plugins.explain_errors import explain

    note_end(error)
    return explain(error)


uncaught_errors = GlobalHooks(lambda: hook_uncaught(_note_and_explain))
"""The ``sys.excepthook`` that explains errors about sharded parameters."""
