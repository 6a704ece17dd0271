"""Tensor classes whose shards keep them, and the operations that need that: a class may lack them, or lose hooks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection
from math import prod

import torch
from torch._subclasses.fake_tensor import FakeTensor

from composable_fsdp._core.layout import TensorShards
from composable_fsdp._core.memory import contiguous_strides
from composable_fsdp._core.params import first_supported
from composable_fsdp.errors import ExtensionError, LostExtensionWarning

GATHER_HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
VIEW_HOOK = "fsdp_get_unsharded_view"


def hooks_of(tensor: torch.Tensor) -> frozenset[str]:
    """Return the names of the hooks that ``tensor`` has."""
    return frozenset(hook for hook in (*GATHER_HOOKS, VIEW_HOOK) if hasattr(tensor, hook))


def num_arguments(name: str, local: torch.Tensor) -> int | None:
    """Return how many arguments ``fsdp_pre_all_gather`` of ``local`` takes, or ``None`` without all-gather hooks.

    Raises:
        ExtensionError: ``local`` has only one of the two hooks, or the first takes neither one nor five arguments.
    """
    found = [hook for hook in GATHER_HOOKS if hasattr(local, hook)]
    if not found:
        return None
    first, second = GATHER_HOOKS
    if len(found) == 1:
        raise ExtensionError(
            f"the local tensor of parameter {name!r} ({type(local).__name__}) defines {found[0]} but not "
            f"{second if found == [first] else first}: a tensor that decides how it is sent needs both."
        )
    arity = len(inspect.signature(getattr(local, first)).parameters)
    if arity not in (1, 5):
        raise ExtensionError(
            f"{first} of parameter {name!r} ({type(local).__name__}) takes {arity} arguments beside self; expected "
            f"{first}(self, mesh) or {first}(self, mesh, outer_size, outer_stride, module, mp_policy)."
        )
    return arity


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
    return first_supported(name, local, "gathered", way)[1]


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
    _, piece = first_supported(name, full, "cut into shards", cuts)
    copies = {"new_zeros and copy_": new_zeros, "clone": clone}
    shard = first_supported(name, full, "copied into memory of its own", copies)[1].to(device)
    lost = hooks_of(full) - hooks_of(shard)
    if lost:
        warn_of_lost_hooks(name, full, shard, lost, "sharded by chunk or narrow, new_zeros and copy_ or clone, and to")
    return shard


def cut_padding(name: str, full: torch.Tensor, shape: tuple[int, ...], dim: int) -> torch.Tensor | None:
    """Return a view of ``full`` without padding, of ``shape``, or ``None`` if ``full`` is not such a tensor.

    ``full`` may be longer on ``dim``. If ``dim`` is 0, it may also be 1-d, contiguous and at least as long. The padding
    is at the end, as with ``torch.chunk``.
    """
    found = tuple(full.shape)
    if found == shape:
        return full
    is_longer = len(found) == len(shape) and found[dim] > shape[dim]
    is_longer = is_longer and found == (*shape[:dim], found[dim], *shape[dim + 1 :])
    is_flat = len(found) == 1 and dim == 0 and found[0] >= prod(shape)
    ways: dict[str, Callable[[], torch.Tensor]] = {}
    if is_longer:
        ways["narrow"] = lambda: full.narrow(dim, 0, shape[dim])
    if (is_longer or is_flat) and dim == 0 and full.is_contiguous():
        ways["as_strided"] = lambda: full.as_strided(shape, contiguous_strides(shape), full.storage_offset())
    if not ways:
        return None
    _, view = first_supported(name, full, f"cut to its shape {shape}", ways)
    return view if tuple(view.shape) == shape else None


def warn_of_lost_hooks(name: str, before: torch.Tensor, after: torch.Tensor, lost: Collection[str], how: str) -> None:
    """Warn that ``after``, the local tensor of parameter ``name``, lacks hooks of ``before``.

    Args:
        how: what was done to ``before``, a participle.
    """
    kind = type(before).__name__
    warnings.warn(
        f"the local tensor of parameter {name!r} has lost its hooks {', '.join(sorted(lost))}: it was a {kind}, and is "
        f"a {type(after).__name__} without them, since it was {how}. The parameter is communicated like a plain one. "
        f"Make these operations of {kind} return a {kind} (__torch_dispatch__ or __torch_function__). Hooks that are "
        "attributes of a tensor object: set them on parameter._local_tensor, after fully_shard and to_empty.",
        LostExtensionWarning,
        stacklevel=2,
    )
