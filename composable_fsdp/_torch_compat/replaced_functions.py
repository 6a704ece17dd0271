"""Functions of torch's FSDP2 that another library has replaced.

Libraries that mend or extend FSDP2 assign to attributes of torch's private classes. What they added has no effect on
modules that this package shards, and the user must know that. It is logged and not raised, since most of these changes
lift limits that this package does not have.
"""

from __future__ import annotations

import contextlib
import logging
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

__all__ = ["log_replaced_functions"]

logger = logging.getLogger(__name__)

_PLACES = (FSDPParam, FSDPParamGroup, FSDPState, _fsdp_collectives, _fsdp_param_group)
_TORCH = str(Path(torch.nn.Module.register_buffer.__code__.co_filename).parents[2])
_DECORATORS = (contextlib.__file__, typing.__file__)
_UNNECESSARY = "is not needed here: parameters and gradients of a group may have several dtypes"
_INSTEAD = {
    "FSDPParam.to_accumulated_grad_if_needed": _UNNECESSARY,
    "FSDPParamGroup._backward_prefetch": "is set_modules_to_backward_prefetch() or set_prefetch_limit() here",
    "FSDPParamGroup._init_mp_dtypes": _UNNECESSARY,
    "FSDPParamGroup.post_backward": "is set_reduce_scatter_unused_params() or set_all_reduce_hook() here",
    "foreach_reduce": _UNNECESSARY,
}


@cache
def log_replaced_functions() -> None:
    """Log each function of torch's FSDP2 that another library has replaced. The first module to be sharded calls it."""
    for name, file in _replaced_functions():
        instead = _INSTEAD.get(name, "may be a custom collective, a comm_policy or a tensor subclass here")
        logger.warning(
            "%s has replaced %s of torch's FSDP2, which modules sharded by composable_fsdp do not call. The change %s. "
            "See docs/upstream-main.md.",
            file,
            name,
            instead,
        )


def _replaced_functions() -> Iterator[tuple[str, str]]:
    """Yield the name and the new file of each function. ``functools.wraps`` does not hide the file of a wrapper."""
    for place in _PLACES:
        for name, function in vars(place).items():
            if isinstance(function, FunctionType):
                file = function.__code__.co_filename
                if not file.startswith(_TORCH) and file not in _DECORATORS:
                    yield f"{place.__name__}.{name}" if isinstance(place, type) else name, file
