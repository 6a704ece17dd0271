"""``patch_torch``: replaces torch's ``fully_shard`` with ours.

Only three functions are replaced. Torch's classes are not: ours inherit from them or accept their objects, so
``isinstance`` and policies work for code on either side. Each replacement is a wrapper, not our function itself, so
that undoing finds it wherever it was imported, and does not change code that imported ours.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping
from types import ModuleType, TracebackType
from typing import Any, cast

from composable_fsdp._api.fsdp_module import has_sharded, share_comm_ctx
from composable_fsdp._api.fully_shard import fully_shard, register_fsdp_forward_method
from composable_fsdp._torch_compat.torch_types import (
    modules_sharded_by_torch,
    torch_fully_shard,
    torch_register_fsdp_forward_method,
    torch_share_comm_ctx,
)
from composable_fsdp.errors import ConfigurationError

__all__ = ["TorchPatch", "has_sharded", "patch_torch"]

Function = Callable[..., Any]

_PACKAGE = __name__.partition(".")[0]


def _wrap(ours: Function, original: Function) -> Function:
    @functools.wraps(ours)
    def function(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    if hasattr(original, "state"):
        cast(Any, function).state = cast(Any, original).state
    return function


_WRAPPERS: Mapping[Function, Function] = {
    original: _wrap(ours, original)
    for original, ours in (
        (torch_fully_shard, fully_shard),
        (torch_register_fsdp_forward_method, register_fsdp_forward_method),
        (torch_share_comm_ctx, share_comm_ctx),
    )
}
_ORIGINALS: Mapping[Function, Function] = {ours: original for original, ours in _WRAPPERS.items()}

_lock = threading.RLock()
_active: set[TorchPatch] = set()


class TorchPatch:
    """Replaces torch's functions until :meth:`undo`, or until a ``with`` block ends. Made by :func:`patch_torch`."""

    def undo(self) -> None:
        """Restore torch's functions, unless another patch is active. Idempotent."""
        with _lock:
            was_active = self in _active
            _active.discard(self)
            if was_active and not _active:
                _replace(_ORIGINALS)

    def __enter__(self) -> TorchPatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.undo()


def patch_torch() -> TorchPatch:
    """Replace ``fully_shard`` and its related functions in ``torch.distributed.fsdp`` with ours, for the whole process.

    This includes re-exports (``torch.distributed._composable.fsdp``) and modules that have imported the functions
    already, ``__main__`` too. It does not include default arguments, attributes of classes and local variables. Classes
    stay torch's. Modules that were sharded stay ours when the patch is undone.

    Patches nest in any order: the last one undone restores torch's functions. Every thread sees the change at once.
    Spawned processes begin without the patch; call it there too.

    >>> import torch.distributed.fsdp
    >>> with patch_torch():
    ...     torch.distributed.fsdp.fully_shard.__module__
    'composable_fsdp._api.fully_shard'
    >>> torch.distributed.fsdp.fully_shard.__module__
    'torch.distributed.fsdp'

    Returns:
        A context manager with a method ``undo``. Unless one of them is used, the patch stays.

    Raises:
        ConfigurationError: torch's own ``fully_shard`` has sharded modules that are still in use.
    """
    patch = TorchPatch()
    with _lock:
        if not _active:
            _check_unused()
            _replace(_WRAPPERS)
        _active.add(patch)
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
    """Replace the keys with the values in the namespaces of all modules but our own."""
    by_id = {id(old): new for old, new in replacements.items()}
    for name, module in list(sys.modules.items()):
        if issubclass(type(module), ModuleType) and name.partition(".")[0] != _PACKAGE:
            namespace = vars(module)
            for key, value in list(namespace.items()):
                if id(value) in by_id:
                    namespace[key] = by_id[id(value)]
