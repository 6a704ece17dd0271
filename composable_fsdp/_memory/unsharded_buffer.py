"""The flat buffer of a bucket's unsharded parameters, freed and allocated again without invalidating its views.

Autograd saves the unsharded tensors and views of them, which stay valid only while their *storage object* lives. So
freeing is ``resize_(0)`` on that storage, and the next all-gather fills the same storage.
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
    """Resize ``storage`` to ``nbytes`` bytes, contents undefined if it grows. No other code allocates storages."""
    if storage.nbytes() != nbytes:  # resize_ would reallocate and copy even to the same size
        storage.resize_(nbytes)


class UnshardedBuffer(Protocol):
    """The memory of one bucket's full parameters while they are unsharded."""

    @property
    def nbytes(self) -> int:
        """The memory in bytes that the buffer takes now, beside the shards."""
        ...

    def allocate(self) -> None:
        """Allocate the memory, contents undefined. Does nothing if it is allocated."""
        ...

    def free(self) -> None:
        """Free the memory. Does nothing if it is free."""
        ...

    def region(self, offset: int, length: int) -> torch.Tensor:
        """Return a 1-d view for writing that does not change the version counters of the parameters in it."""
        ...

    def parameter_data(self, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the view of one parameter, with a version counter of its own."""
        ...


class OwnedBuffer:
    """Memory of its own, freed to zero bytes between uses. Allocated at construction, so that views can be taken."""

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
    """The memory of the shards, if one rank holds all or ranks share it: nothing is gathered or freed."""

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
    """Return the strides, in elements, of a contiguous tensor of ``shape``."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def view_at(flat: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the contiguous view of ``shape`` at ``offset`` elements from the start of ``flat``."""
    return flat.as_strided(shape, contiguous_strides(shape), flat.storage_offset() + offset)
