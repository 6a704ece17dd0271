"""Support for running code written for torch's FSDP2 on this package, unchanged.

Use ``with patch_torch(): ...`` in a program, or run it with ``composable-fsdp run script.py``, or under ``torchrun``
with ``-m composable_fsdp run script.py``. :func:`allow_fsdp_on_cpu` is for programs on accelerate.

Only three functions of torch are replaced. Torch's classes are not: ours inherit from them or accept their objects, so
``isinstance`` and policies work for code on either side. Each replacement is a wrapper, not our function itself, so
that undoing finds it wherever it was imported, and does not change code that imported ours.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from composable_fsdp import fully_shard, register_fsdp_forward_method, share_comm_ctx
from composable_fsdp._api.torch_types import TORCH_FUNCTIONS, modules_sharded_by_torch
from composable_fsdp.errors import ConfigurationError

__all__ = ["TorchPatch", "allow_fsdp_on_cpu", "patch_torch"]


def _wrap(ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(ours)
    def function(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    return function


_OURS = tuple(_wrap(ours) for ours in (fully_shard, register_fsdp_forward_method, share_comm_ctx))
_lock = threading.RLock()
_active: set[TorchPatch] = set()


class TorchPatch(ExitStack):
    """Replaces torch's functions until :meth:`undo`, or until a ``with`` block ends. Made by :func:`patch_torch`."""

    def undo(self) -> None:
        """Restore torch's functions, unless another patch is active. Idempotent."""
        self.close()


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
            _replace(TORCH_FUNCTIONS, _OURS)
        _active.add(patch)
    patch.callback(_end, patch)
    return patch


def allow_fsdp_on_cpu() -> None:
    """Make accelerate use its FSDP plugin on CPU as on accelerators, in every ``Accelerator`` that is made later.

    On CPU, accelerate drops the plugin silently and trains with ``DistributedDataParallel``, and so do transformers'
    ``Trainer`` and trl. The command line has it as ``composable-fsdp run --allow-cpu``. Further calls have no effect.

    Raises:
        ConfigurationError: accelerate is not installed.
    """
    try:
        from accelerate.state import AcceleratorState, PartialState
        from accelerate.utils import DistributedType
    except ImportError as error:
        raise ConfigurationError(f"accelerate cannot be imported ({error}): pip install accelerate.") from None
    original = AcceleratorState.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type is DistributedType.MULTI_CPU:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = __init__


def _end(patch: TorchPatch) -> None:
    with _lock:
        _active.discard(patch)
        if not _active:
            _replace(_OURS, TORCH_FUNCTIONS)


def _check_unused() -> None:
    sharded = modules_sharded_by_torch()
    if sharded:
        names = ", ".join(sorted({type(module).__name__.removeprefix("FSDP") for module in sharded}))
        raise ConfigurationError(
            f"torch's own fully_shard has sharded {len(sharded)} modules that are still in use ({names}), and it must "
            "handle them to the end. Call patch_torch() before the first of them is sharded."
        )


def _replace(old: tuple[Callable[..., Any], ...], new: tuple[Callable[..., Any], ...]) -> None:
    """Replace functions in the namespaces of all modules but our own."""
    by_id = dict(zip(map(id, old), new, strict=True))
    for name, module in list(sys.modules.items()):
        if issubclass(type(module), ModuleType) and name.partition(".")[0] != "composable_fsdp":
            namespace = vars(module)
            for key, value in list(namespace.items()):
                if id(value) in by_id:
                    namespace[key] = by_id[id(value)]
