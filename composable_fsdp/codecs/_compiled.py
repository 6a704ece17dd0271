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

    The first message of each size class compiles it, on all ranks at the same time, which may take minutes. Compiled
    code may differ from eager mode in the last bit of a division, equally on all ranks. ``TORCHDYNAMO_DISABLE=1`` turns
    off all compilation.
    """

    @wraps(method)
    def call(codec: object, tensor: torch.Tensor, *rest: object) -> torch.Tensor:
        if not _is_compiled_for(tensor.device):
            return method(codec, tensor, *rest)
        return _compiled(method)(codec, tensor.data, *rest)  # code for a view is compiled for the form of its base

    return cast(Method, call)


@lru_cache(maxsize=1)
def _compilable() -> bool:
    return has_triton()


def _is_compiled_for(device: torch.device) -> bool:
    return is_accelerator(device) and _compilable()


@lru_cache(maxsize=64)
def _compiled(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return torch.compile(method, dynamic=True)
