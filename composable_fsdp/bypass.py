"""Methods of sharded modules that compute without the module being called.

Only calls bring parameters into memory. A method that computes with sharded ones ends in an error of ``DTensor``, which
knows nothing of modules; here it is told which method that was and what to do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from composable_fsdp.errors import LifecycleError
from composable_fsdp.runtime.unit import Unit, unit_of

__all__ = ["explaining_methods"]

_MIXED = "got mixed torch.Tensor and DTensor"


def explaining_methods(original: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """The public methods that ``original`` has besides those of every module, as a subclass of it needs them."""
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
            unit = unit_of(self)
            if isinstance(error, LifecycleError) or _MIXED not in str(error) or unit.is_running:
                raise
            raise _bypassed(name, unit) from error

    return method


def _bypassed(method: str, unit: Unit) -> LifecycleError:
    names = [parameter.name for parameter in unit.group.parameters]
    held = f", such as {names[0]!r}" if names else ""
    return LifecycleError(
        f"{method}() of {unit.class_name} computed with parameters that are sharded{held}: only calls of the module "
        f"{unit.name!r} itself bring them into memory. After fully_shard, call "
        f"composable_fsdp.register_fsdp_forward_method(module, {method!r}); or put module.unshard() before it and "
        "module.reshard() after it."
    )
