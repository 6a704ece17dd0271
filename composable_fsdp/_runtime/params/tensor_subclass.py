"""Support for tensor subclasses: their FSDP hooks, and the few operations that sharding needs.

A subclass may lack an operation, or an operation may return a plain tensor. The functions here raise errors that name
the parameter, the class and the missing operation, and warn if an operation loses the hooks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from math import prod
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from composable_fsdp._layout.pack import take_shard
from composable_fsdp._layout.shard import TensorShards
from composable_fsdp._memory.buffers import contiguous_strides
from composable_fsdp.errors import ParameterError

__all__ = [
    "GATHER_HOOKS",
    "GRADIENT_HOOKS",
    "VIEW_HOOK",
    "LostExtensionWarning",
    "as_parameter",
    "copy_shard",
    "cut_padding",
    "cut_shard",
    "hooks_of",
    "is_wrapper",
    "keeps_class",
    "parameter_class",
    "plain_tensors",
    "plain_values",
    "warn_of_lost_hooks",
]

GATHER_HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
GRADIENT_HOOKS = ("fsdp_pre_reduce_scatter", "fsdp_post_reduce_scatter")
VIEW_HOOK = "fsdp_get_unsharded_view"

T = TypeVar("T")


class LostExtensionWarning(UserWarning):
    """A tensor's all-gather or reduce-scatter hooks were lost, so its parameter is communicated like a plain one."""


def hooks_of(tensor: torch.Tensor) -> frozenset[str]:
    """Return the names of the hooks that ``tensor`` has, for itself and for its gradient."""
    return frozenset(hook for hook in (*GATHER_HOOKS, *GRADIENT_HOOKS, VIEW_HOOK) if hasattr(tensor, hook))


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


def keeps_class(tensor: torch.Tensor) -> bool:
    """Return True if shards of ``tensor`` have its class: it has hooks, or a ``__torch_dispatch__`` of its own.

    Values of others are in memory of their own and are stored in plain shards.
    """
    is_plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ or isinstance(tensor, FakeTensor)
    return not is_plain or bool(hooks_of(tensor))


def plain_values(name: str, local: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of ``local``, the shard of parameter ``name``, as a plain tensor of ``dtype``.

    Raises:
        ParameterError: the class of ``local`` lacks the operation, which the error names.
    """
    if type(local) is torch.Tensor:
        return local.detach().to(dtype)
    plain = torch.empty(local.shape, dtype=dtype, device=local.device)
    way = {"copy_ into a plain tensor": lambda: plain.copy_(local.detach())}
    return _first_supported(name, local, "gathered", way)[1]


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the inner plain tensors of ``tensor``, or ``tensor`` itself if it is plain."""
    if not is_wrapper(tensor):
        yield tensor
        return
    attributes, _ = cast(Any, tensor).__tensor_flatten__()
    for attribute in attributes:
        yield from plain_tensors(getattr(tensor, attribute))


def cut_shard(name: str, full: torch.Tensor, shards: TensorShards, rank: int, device: torch.device) -> torch.Tensor:
    """Return the shard of ``rank`` of parameter ``name`` in its own memory, with the class of ``full``.

    Raises:
        ParameterError: the class lacks an operation, which the error names.

    Warns:
        LostExtensionWarning: ``full`` has hooks, and an operation returned a tensor without them.
    """
    owned = shards.layout.owned_by(rank)

    def chunk() -> torch.Tensor | None:
        chunks = torch.chunk(full.detach(), shards.num_shards, dim=shards.dim)
        return chunks[rank] if rank < len(chunks) else None

    def narrow() -> torch.Tensor:
        return full.detach().narrow(shards.dim, owned.start, len(owned))

    def new_zeros() -> torch.Tensor:
        shard = full.new_zeros(shards.shard_shape(rank))
        return shard if piece is None else shard.copy_(piece)

    def clone() -> torch.Tensor:
        return (narrow() if piece is None else piece).clone()

    cuts: dict[str, Callable[[], torch.Tensor | None]] = {"chunk": chunk, "narrow": narrow}
    cut_by, piece = _first_supported(name, full, "cut into shards", cuts)
    copies = {"new_zeros and copy_": new_zeros, "clone": clone}
    copied_by, shard = _first_supported(name, full, "copied into memory of its own", copies)
    moved = shard.to(device)
    lost = hooks_of(full) - hooks_of(moved)
    if lost:
        by = f"to({str(device)!r})" if not hooks_of(full) - hooks_of(shard) else copied_by
        if by == "clone" and piece is not None and hooks_of(full) - hooks_of(piece):
            by = cut_by
        warn_of_lost_hooks(name, full, moved, lost, f"{by} of that class returned")
    return moved


def copy_shard(name: str, full: torch.Tensor, shards: TensorShards, rank: int, padded: torch.Tensor) -> None:
    """Copy the shard of ``rank`` of parameter ``name`` into ``padded``, a plain 1-d tensor of zeros.

    Raises:
        ParameterError: the class of ``full`` lacks an operation, which the error names.
    """
    way = {"narrow and copy_": lambda: take_shard(shards, full.detach(), rank, padded)}
    _first_supported(name, full, "copied into a plain shard", way)


def cut_padding(name: str, full: torch.Tensor, shape: tuple[int, ...], dim: int) -> torch.Tensor | None:
    """Return a view of ``full`` without padding, of ``shape``, or ``None`` if ``full`` is not such a tensor.

    ``full`` may be longer on ``dim``. If ``dim`` is 0, it may also be 1-d, contiguous and at least as long. The padding
    is at the end, as with ``torch.chunk``.
    """
    found = tuple(full.shape)
    if found == shape:
        return full
    is_longer = len(found) == len(shape) and found[dim] > shape[dim] and _without(found, dim) == _without(shape, dim)
    is_flat = len(found) == 1 and dim == 0 and found[0] >= prod(shape)
    ways: dict[str, Callable[[], torch.Tensor]] = {}
    if is_longer:
        ways["narrow"] = lambda: full.narrow(dim, 0, shape[dim])
    if (is_longer or is_flat) and dim == 0 and full.is_contiguous():
        ways["as_strided"] = lambda: full.as_strided(shape, contiguous_strides(shape), full.storage_offset())
    if not ways:
        return None
    _, view = _first_supported(name, full, f"cut to its shape {shape}", ways)
    return view if tuple(view.shape) == shape else None


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def warn_of_lost_hooks(name: str, before: torch.Tensor, after: torch.Tensor, lost: Collection[str], how: str) -> None:
    """Warn that ``after``, the local tensor of parameter ``name``, lacks hooks of ``before``.

    Args:
        how: a clause of the warning that names the operation and ends with a verb; its object is ``after``.
    """
    instance_hooks = sorted(set(lost) & set(vars(before)))
    remedy = (
        "The hooks are attributes of the tensor object: set them on parameter._local_tensor once nothing replaces it "
        "any more, after fully_shard and to_empty."
        if instance_hooks
        else f"Make these operations of {type(before).__name__} return a {type(before).__name__} (in its "
        "__torch_dispatch__ or __torch_function__)."
    )
    warnings.warn(
        f"the local tensor of parameter {name!r} has lost its hooks {', '.join(sorted(lost))}: it was a "
        f"{type(before).__name__}, and {how} a {type(after).__name__} without them. The parameter is now communicated "
        f"like a plain one. {remedy}",
        LostExtensionWarning,
        stacklevel=2,
    )


def _first_supported(name: str, tensor: torch.Tensor, done: str, ways: Mapping[str, Callable[[], T]]) -> tuple[str, T]:
    """Return the name and the result of the first of ``ways`` that the class of ``tensor`` supports."""
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
