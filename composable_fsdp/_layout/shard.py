"""Sharding of one tensor dim over the ranks of one mesh axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from composable_fsdp.errors import ParameterError, ShardDimError

__all__ = ["ShardLayout", "TensorShards", "resolve_dim"]


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """One tensor dim split into ``num_shards`` equal shards, the tail zero-padded (the rule of ``torch.chunk``).

    Invariant: the ranges of ranks 0..n-1, in order, tile ``range(length)`` exactly.
    """

    length: int
    num_shards: int

    @property
    def padded_shard(self) -> int:
        """The number of rows in every rank's shard, padding included."""
        return -(-self.length // self.num_shards)

    @property
    def padded_length(self) -> int:
        return self.padded_shard * self.num_shards

    @property
    def is_even(self) -> bool:
        return self.padded_length == self.length

    def owned_by(self, rank: int) -> range:
        """Return the indices of the dim that ``rank`` holds; empty for the last ranks of a short dim."""
        start = min(rank * self.padded_shard, self.length)
        return range(start, min(start + self.padded_shard, self.length))


@dataclass(frozen=True, slots=True)
class TensorShards:
    """A tensor of ``shape`` sharded on ``dim`` into ``num_shards`` shards.

    Invariant: every rank's shard has ``padded_numel`` elements: first the ones that it owns, contiguous in the order of
    a tensor of ``shard_shape(rank)``, then padding. On a dim other than the first this is *not* a narrowed view of a
    tensor of ``padded_shape``: local shards stay contiguous however uneven the sharding is.

    The derived numbers are computed once, because every step looks them up for every parameter.
    """

    shape: tuple[int, ...]
    dim: int
    num_shards: int
    layout: ShardLayout = field(init=False, compare=False, repr=False)
    numel: int = field(init=False, compare=False, repr=False)
    padded_shape: tuple[int, ...] = field(init=False, compare=False, repr=False)
    """Shape of one rank's shard with its padding."""
    padded_numel: int = field(init=False, compare=False, repr=False)
    concatenates: bool = field(init=False, compare=False, repr=False)
    """True if the concatenation of the padded shards is the tensor's own memory followed by padding."""

    def __post_init__(self) -> None:
        layout = ShardLayout(self.shape[self.dim], self.num_shards)
        padded_shape = (*self.shape[: self.dim], layout.padded_shard, *self.shape[self.dim + 1 :])
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "numel", prod(self.shape))
        object.__setattr__(self, "padded_shape", padded_shape)
        object.__setattr__(self, "padded_numel", prod(padded_shape))
        object.__setattr__(self, "concatenates", prod(self.shape[: self.dim]) == 1)

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the shard that ``rank`` owns, without padding."""
        return (*self.shape[: self.dim], len(self.layout.owned_by(rank)), *self.shape[self.dim + 1 :])

    @property
    def full_numel(self) -> int:
        """The number of elements that the gathered full tensor needs, with the tail that receives the padding."""
        return self.padded_numel * self.num_shards if self.concatenates else self.numel


def resolve_dim(dim: int, shape: Sequence[int], name: str) -> int:
    """Return ``dim`` counted from the front, or raise a ``ParameterError`` that names the parameter."""
    if not shape:
        raise ParameterError(
            f"parameter {name!r} is a scalar (0-d) and has no dim to shard. Make it 1-d with one element "
            "(for example nn.Parameter(value.reshape(1))), or pass it in ignored_params."
        )
    if not -len(shape) <= dim < len(shape):
        raise ShardDimError(
            f"parameter {name!r} of shape {tuple(shape)} has no dim {dim}: "
            f"shard_placement_fn may return Shard(d) with {-len(shape)} <= d < {len(shape)}."
        )
    return dim % len(shape)
