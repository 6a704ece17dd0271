"""Compilation of codecs on accelerators: one or two kernels instead of a dozen."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TypeVar, cast

import torch
from torch.utils._triton import has_triton

from composable_fsdp._core.memory import is_accelerator

Method = TypeVar("Method", bound=Callable[..., torch.Tensor])


def fused(method: Method) -> Method:
    """Compile a codec's ``encode`` or ``decode`` on accelerators with Triton; run it eagerly elsewhere.

    The first forward compiles what messages need, before any collective (``plugins/codecs``). Compiled code may differ
    from eager mode in the last bit of a division, equally on all ranks. ``TORCHDYNAMO_DISABLE=1`` turns off all
    compilation.
    """

    @wraps(method)
    def call(codec: object, tensor: torch.Tensor, *rest: object) -> torch.Tensor:
        if not _is_compiled_for(tensor.device):
            return method(codec, tensor, *rest)
        return _compiled(method)(codec, tensor.data, *rest)  # code for a view is compiled for the form of its base

    _fused.add(call)
    return cast(Method, call)


_fused: set[object] = set()
"""The methods that may be compiled."""


def is_compiled(codec: object, device: torch.device) -> bool:
    """Return True if methods of ``codec`` are compiled for ``device``."""
    method = getattr(type(codec), "encode", None)
    return method in _fused and _is_compiled_for(device)


@lru_cache(maxsize=1)
def _compilable() -> bool:
    return has_triton()


def _is_compiled_for(device: torch.device) -> bool:
    return is_accelerator(device) and _compilable()


@lru_cache(maxsize=64)
def _compiled(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return torch.compile(method, dynamic=True)
