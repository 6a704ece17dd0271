"""Counts the bytes of all live tensors of a process on a simulated device.

Memory is counted after every operation. Temporary memory inside a kernel is not counted, because it differs between the
kernels of CPUs and other devices. Fake tensors are counted like others, so models may have any size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Ledger"]


class Ledger(TorchDispatchMode):
    """A context that counts memory.

    Attributes:
        held: the bytes after the last operation.
        peak: the largest number of bytes after any operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # is dispatched again as operations on its local tensor
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs, result)):
            if isinstance(each, torch.Tensor) and not isinstance(each, DTensor):
                self._track(each.untyped_storage())
        self.count()
        return result

    def _track(self, storage: torch.UntypedStorage) -> None:
        known = self._storages.get(storage._cdata)
        if known is None or known.expired():
            self._storages[storage._cdata] = StorageWeakRef(storage)

    def forget_peak(self) -> None:
        """Reset the peak."""
        self.peak = self.count()

    def count(self) -> int:
        """Return the bytes held now."""
        self.held = 0
        for key, reference in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._storages[key]
            else:
                self.held += storage.nbytes()
        self.peak = max(self.peak, self.held)
        return self.held
