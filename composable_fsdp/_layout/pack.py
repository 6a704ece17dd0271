"""Copies between full tensors and the shards of all ranks, as a layout says.

At most one rank holds a shard that is neither full nor empty. So a tensor is a block of full shards and at most one
short shard: two strided copies however many ranks there are, one if the tensor is sharded evenly.

Nothing here allocates or waits. Call it under ``torch.no_grad``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from torch import Tensor

from composable_fsdp._layout.shard import TensorShards

__all__ = ["pack_gradient", "take_shard", "unpack_parameter"]


def pack_gradient(shards: TensorShards, gradient: Tensor | None, rows: Tensor) -> None:
    """Copy each rank's shard of ``gradient`` into that rank's row of a message, and cast it to the message's dtype.

    Args:
        shards: how the gradient's parameter is sharded.
        gradient: of shape ``shards.shape``, any strides, any dtype; ``None`` counts as zeros.
        rows: ``(num_shards, padded_numel)``, contiguous along the last dim only: a column block of the message. Padding
            is not written.
    """
    if gradient is None:
        rows.zero_()
        return
    for part, piece in _same_elements(shards, gradient, rows):
        piece.copy_(part)


def unpack_parameter(shards: TensorShards, rows: Tensor, place: Tensor) -> None:
    """Copy the shards of all ranks into one full tensor, ``place[: numel].view(shape)``.

    Args:
        shards: how the parameter is sharded.
        rows: ``(num_shards, padded_numel)``, contiguous along the last dim only: a column block of the message.
        place: 1-d and contiguous, at least ``shards.full_numel`` elements; elements after those are not written.
    """
    views = _views_of(shards)
    if views.concatenates:
        place[: views.full_numel].view(rows.shape).copy_(rows)
        return
    full = place[: views.full_numel].view(shards.shape)
    for part, piece in _same_elements(shards, full, rows):
        part.copy_(piece)


def take_shard(shards: TensorShards, full: Tensor, rank: int, out: Tensor) -> None:
    """Copy the shard of ``rank`` from ``full`` into ``out``, cast to its dtype, and zero the padding.

    Args:
        shards: how the tensor is sharded.
        full: of shape ``shards.shape``, any strides, any dtype.
        rank: the owner of the shard, in ``range(num_shards)``.
        out: 1-d and contiguous, ``padded_numel`` elements.
    """
    owned, shape = shards.layout.owned_by(rank), shards.shard_shape(rank)
    numel = prod(shape)
    out[:numel].view(shape).copy_(full.narrow(shards.dim, owned.start, len(owned)))
    if numel < shards.padded_numel:
        out[numel:].zero_()


@dataclass(frozen=True, slots=True)
class _ShardViews:
    """The view shapes that match a full tensor's memory with the ranks' rows.

    The first ``num_full`` ranks own full shards. Their rows, viewed as ``block`` and permuted to ``order``, are the
    first ``full_length`` indices of the sharded dim, viewed as ``split``. The next rank owns ``short_shape``, maybe
    empty.
    """

    concatenates: bool
    full_numel: int
    num_full: int
    full_length: int
    block: tuple[int, ...]
    order: tuple[int, ...]
    split: tuple[int, ...]
    short_shape: tuple[int, ...]
    short_numel: int


@lru_cache(maxsize=8192)
def _views_of(shards: TensorShards) -> _ShardViews:
    """Return the view shapes of ``shards``, cached: computing them costs as much as the copy of a small tensor."""
    dim, length, piece = shards.dim, shards.layout.length, shards.layout.padded_shard
    num_full = length // max(1, piece)
    before, after = shards.shape[:dim], shards.shape[dim + 1 :]
    short_shape = (*before, length - num_full * piece, *after)
    return _ShardViews(
        concatenates=shards.concatenates,
        full_numel=shards.full_numel,
        num_full=num_full,
        full_length=num_full * piece,
        block=(num_full, *shards.padded_shape),
        order=(*range(1, dim + 1), 0, *range(dim + 1, len(shards.shape) + 1)),
        split=(*before, num_full, piece, *after),
        short_shape=short_shape,
        short_numel=prod(short_shape),
    )


def _same_elements(shards: TensorShards, full: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of views of ``full`` and ``rows`` with the same elements at equal indices. They cover ``full``."""
    views = _views_of(shards)
    if views.num_full == shards.num_shards:
        yield full.view(views.split), rows.view(views.block).permute(views.order)
        return
    block = full.narrow(shards.dim, 0, views.full_length)
    yield block.view(views.split), rows[: views.num_full].view(views.block).permute(views.order)
    if views.short_numel:
        short = full.narrow(shards.dim, views.full_length, views.short_shape[shards.dim])
        yield short, rows[views.num_full, : views.short_numel].view(views.short_shape)
