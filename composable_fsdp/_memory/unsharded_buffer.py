"""The flat buffer in which a bucket's parameters are gathered, taken and given back without losing its views.

Autograd saves the unsharded tensors and views of them. They stay valid only while their *storage object* lives, so
giving memory back is ``resize_(0)`` on that storage, and gathering again fills the same storage.
"""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = [
    "AliasedBuffer",
    "OwnedBuffer",
    "UnshardedBuffer",
    "allocate_storage",
    "contiguous_strides",
    "view_at",
]


def allocate_storage(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Gives ``storage`` ``nbytes`` bytes, contents undefined unless it has them. The only place that does."""
    if storage.nbytes() != nbytes:  # torch would take other memory and copy all of it
        storage.resize_(nbytes)


class UnshardedBuffer(Protocol):
    """Where the full parameters of one bucket are while they are needed."""

    @property
    def nbytes(self) -> int:
        """Memory that it takes now, beside the shards."""
        ...

    def allocate(self) -> None:
        """Makes the memory usable; contents undefined. Legal when it already is."""
        ...

    def free(self) -> None:
        """Gives the memory back. Legal when it already is."""
        ...

    def region(self, offset: int, length: int) -> torch.Tensor:
        """1-d view for writing. Does not touch the version counters of the parameters that lie there."""
        ...

    def parameter_data(self, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """View for one parameter, with a version counter of its own."""
        ...


class OwnedBuffer:
    """Memory beside the shards, freed to zero bytes between uses. Allocated when made, so that views can be taken."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._flat = torch.empty(numel, dtype=dtype, device=device)
        self._storage = self._flat.untyped_storage()
        self._writable = self._flat.data
        self._full_nbytes = numel * dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self._storage.nbytes()

    def allocate(self) -> None:
        allocate_storage(self._storage, self._full_nbytes)

    def free(self) -> None:
        self._storage.resize_(0)

    def region(self, offset: int, length: int) -> torch.Tensor:
        return self._writable[offset : offset + length]

    def parameter_data(self, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        return view_at(self._flat.data, offset, shape)


class AliasedBuffer:
    """The shards themselves, where one rank holds all or ranks have them in common: nothing is gathered, or freed."""

    def __init__(self, store: torch.Tensor) -> None:
        self._flat = store

    @property
    def nbytes(self) -> int:
        return 0

    def allocate(self) -> None:
        pass

    def free(self) -> None:
        pass

    def region(self, offset: int, length: int) -> torch.Tensor:
        return self._flat.data[offset : offset + length]

    def parameter_data(self, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        return view_at(self._flat.data, offset, shape)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of ``shape``."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def view_at(flat: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The contiguous view of ``shape`` that begins ``offset`` elements after the beginning of ``flat``."""
    return flat.as_strided(shape, contiguous_strides(shape), flat.storage_offset() + offset)
