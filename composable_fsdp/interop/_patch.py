"""``patch_torch``: who imports ``fully_shard`` from torch gets ours.

Only the three functions are replaced. Torch's classes need not be: ours inherit from them, or accept their objects, so
that ``isinstance`` and policies mean the same to code on either side. What stands in for a function is an object of its
own, not ours itself: so undoing finds it wherever it has been imported to, and leaves alone who imported ours.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping
from types import ModuleType, TracebackType
from typing import Any, cast

from composable_fsdp._api.fsdp_module import share_comm_ctx
from composable_fsdp._api.fully_shard import fully_shard, register_fsdp_forward_method
from composable_fsdp._torch_compat.torch_types import (
    modules_sharded_by_torch,
    torch_fully_shard,
    torch_register_fsdp_forward_method,
    torch_share_comm_ctx,
)
from composable_fsdp.errors import ConfigurationError

__all__ = ["TorchPatch", "patch_torch"]

Function = Callable[..., Any]

_PACKAGE = __name__.partition(".")[0]


def _stand_in(ours: Function, original: Function) -> Function:
    @functools.wraps(ours)
    def function(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    if hasattr(original, "state"):
        cast(Any, function).state = cast(Any, original).state
    return function


_STAND_INS: Mapping[Function, Function] = {
    original: _stand_in(ours, original)
    for original, ours in (
        (torch_fully_shard, fully_shard),
        (torch_register_fsdp_forward_method, register_fsdp_forward_method),
        (torch_share_comm_ctx, share_comm_ctx),
    )
}
_ORIGINALS: Mapping[Function, Function] = {ours: original for original, ours in _STAND_INS.items()}

_lock = threading.RLock()
_in_force: set[TorchPatch] = set()


class TorchPatch:
    """Torch's names stand for ours until :meth:`undo`, or until a ``with`` block ends. Made by :func:`patch_torch`."""

    def undo(self) -> None:
        """Gives torch's names their own objects back, unless another patch is in force. Twice is once."""
        with _lock:
            was_in_force = self in _in_force
            _in_force.discard(self)
            if was_in_force and not _in_force:
                _replace(_ORIGINALS)

    def __enter__(self) -> TorchPatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.undo()


def patch_torch() -> TorchPatch:
    """Makes ``fully_shard`` and its companions in ``torch.distributed.fsdp`` ours, for the whole process.

    Also where they are exported again (``torch.distributed._composable.fsdp``), and where a module has imported them
    already, ``__main__`` included. Not what lies deeper: default arguments, attributes of classes, local variables.
    Classes stay torch's. What has been sharded stays ours when the patch is undone.

    Patches nest, in any order: the last one undone gives the names back. Every thread sees the change at once.
    Processes that this one spawns begin without; call it there too.

    >>> import torch.distributed.fsdp
    >>> with patch_torch():
    ...     torch.distributed.fsdp.fully_shard.__module__
    'composable_fsdp._api.fully_shard'
    >>> torch.distributed.fsdp.fully_shard.__module__
    'torch.distributed.fsdp'

    Returns:
        What undoes it: a context manager, with a method ``undo``. Without either it stays.

    Raises:
        ConfigurationError: torch's own ``fully_shard`` has sharded modules that are still in use.
    """
    patch = TorchPatch()
    with _lock:
        if not _in_force:
            _check_unused()
            _replace(_STAND_INS)
        _in_force.add(patch)
    return patch


def _check_unused() -> None:
    sharded = modules_sharded_by_torch()
    if sharded:
        names = ", ".join(sorted({type(module).__name__.removeprefix("FSDP") for module in sharded}))
        raise ConfigurationError(
            f"torch's own fully_shard has sharded {len(sharded)} modules that are still in use ({names}), and it must "
            "handle them to the end. Call patch_torch() before the first of them is sharded."
        )


def _replace(replacements: Mapping[Function, Function]) -> None:
    """Puts the values in place of the keys in the namespaces of all modules but our own."""
    by_id = {id(old): new for old, new in replacements.items()}
    for name, module in list(sys.modules.items()):
        if issubclass(type(module), ModuleType) and name.partition(".")[0] != _PACKAGE:
            namespace = vars(module)
            for key, value in list(namespace.items()):
                if id(value) in by_id:
                    namespace[key] = by_id[id(value)]
