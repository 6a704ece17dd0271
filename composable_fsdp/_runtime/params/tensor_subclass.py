"""Support for subclasses of tensors and parameters: the few operations that sharding needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from composable_fsdp._layout.pack import take_shard
from composable_fsdp._layout.shard import TensorShards
from composable_fsdp.errors import ParameterError

__all__ = [
    "as_parameter",
    "copy_shard",
    "first_supported",
    "is_wrapper",
    "parameter_class",
    "plain_tensors",
]

T = TypeVar("T")


def parameter_class(tensor: torch.Tensor) -> type[nn.Parameter]:
    """Return the class of ``tensor`` if it is a subclass of ``nn.Parameter``, else ``nn.Parameter``."""
    # isinstance() is True for any tensor marked as a parameter, whatever its class.
    return cast("type[nn.Parameter]", type(tensor)) if issubclass(type(tensor), nn.Parameter) else nn.Parameter


def as_parameter(value: torch.Tensor, kind: type[nn.Parameter], requires_grad: bool) -> nn.Parameter:
    """Return ``value`` as a parameter of class ``kind``, without calling its constructor.

    A tensor subclass stays what it is, as with ``nn.Parameter(value)``.
    """
    if kind is nn.Parameter or type(value) is not torch.Tensor:
        return nn.Parameter(value, requires_grad=requires_grad)
    return torch.Tensor._make_subclass(kind, value, requires_grad)


def is_wrapper(tensor: Any) -> bool:
    """Return True if the class of ``tensor`` implements ``__tensor_flatten__``."""
    return is_traceable_wrapper_subclass(tensor)


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the inner plain tensors of ``tensor``, or ``tensor`` itself if it is plain."""
    if not is_wrapper(tensor):
        yield tensor
        return
    attributes, _ = cast(Any, tensor).__tensor_flatten__()
    for attribute in attributes:
        yield from plain_tensors(getattr(tensor, attribute))


def copy_shard(name: str, full: torch.Tensor, shards: TensorShards, rank: int, padded: torch.Tensor) -> None:
    """Copy the shard of ``rank`` of parameter ``name`` into ``padded``, a plain 1-d tensor of zeros.

    Raises:
        ParameterError: the class of ``full`` lacks an operation, which the error names.
    """
    way = {"narrow and copy_": lambda: take_shard(shards, full.detach(), rank, padded)}
    first_supported(name, full, "copied into a plain shard", way)


def first_supported(name: str, tensor: torch.Tensor, done: str, ways: Mapping[str, Callable[[], T]]) -> tuple[str, T]:
    """Return the name and the result of the first of ``ways`` that the class of ``tensor`` supports.

    Raises:
        ParameterError: it supports none. The error names the parameter, its class and the operations.
    """
    unsupported: dict[str, Exception] = {}
    for operation, way in ways.items():
        try:
            return operation, way()
        except Exception as error:  # noqa: PERF203 (one or two ways; classes refuse with errors of any type)
            if type(tensor) in (torch.Tensor, nn.Parameter) or isinstance(error, torch.OutOfMemoryError):
                raise
            unsupported[operation] = error
    reasons = "; ".join(f"{operation}: {type(error).__name__}: {error}" for operation, error in unsupported.items())
    raise ParameterError(
        f"parameter {name!r} is a {type(tensor).__name__}, which cannot be {done}: {reasons}. Implement one of these "
        "operations for the class, or pass the parameter in ignored_params."
    ) from list(unsupported.values())[-1]
