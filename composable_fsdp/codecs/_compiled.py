"""Compilation of codecs on accelerators: one or two kernels instead of a dozen."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TypeVar, cast

import torch
from torch.utils._triton import has_triton

from composable_fsdp._memory.device_capabilities import is_accelerator

__all__ = ["fused"]

Method = TypeVar("Method", bound=Callable[..., torch.Tensor])


def fused(method: Method) -> Method:
    """Compile a codec's ``encode`` or ``decode`` on accelerators with Triton; run it eagerly elsewhere.

    The first message of a codec on an accelerator waits for the compiler. Compiled code may differ from eager mode in
    the last bit of a division, equally on all ranks. ``TORCHDYNAMO_DISABLE=1`` turns it off, like all of compilation. A
    codec whose attribute ``compiles`` is false always runs eagerly.
    """

    @wraps(method)
    def call(codec: object, tensor: torch.Tensor, *rest: object) -> torch.Tensor:
        compiles = getattr(codec, "compiles", True) and _is_compiled_for(tensor.device)
        return (_compiled(method) if compiles else method)(codec, tensor, *rest)

    return cast(Method, call)


@lru_cache(maxsize=1)
def _compilable() -> bool:
    return has_triton()


def _is_compiled_for(device: torch.device) -> bool:
    return is_accelerator(device) and _compilable()


@lru_cache(maxsize=64)
def _compiled(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return torch.compile(method, dynamic=True)
