"""What a process holds on a simulated device: the bytes of all tensors that operations have seen and that still live.

Every operation is a moment at which it is counted, so what a kernel takes and gives back within itself is left out: a
device's kernels do so otherwise than a CPU's. Fake tensors count like others, so models may be as large as they like.
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
    """Counts while it is entered.

    Attributes:
        held: bytes after the last operation.
        peak: the most after any.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes back as operations on its local tensor
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs, result)):
            if isinstance(each, torch.Tensor) and not isinstance(each, DTensor):
                self._see(each.untyped_storage())
        self.count()
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        known = self._storages.get(storage._cdata)
        if known is None or known.expired():
            self._storages[storage._cdata] = StorageWeakRef(storage)

    def forget_peak(self) -> None:
        """Counts anew from here on."""
        self.peak = self.count()

    def count(self) -> int:
        """Bytes held now."""
        self.held = 0
        for key, reference in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._storages[key]
            else:
                self.held += storage.nbytes()
        self.peak = max(self.peak, self.held)
        return self.held
