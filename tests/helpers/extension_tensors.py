"""Tensor subclasses with all-gather hooks, for the tests of extensions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map

calls: list[str] = []
"""Descriptions of the calls of the hooks, in order."""


class Pair(torch.Tensor):
    """A tensor that is the sum of two others, which are both sent. Supports sharding, training and optimizers."""

    @staticmethod
    def __new__(cls, left: torch.Tensor, right: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, left.shape, strides=left.stride(), dtype=left.dtype, device=left.device
        )

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.left, self.right = left, right

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.left}, {self.right})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["left", "right"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: object) -> Any:
        return Pair(inner["left"], inner["right"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in _SUMMED:
            plain = tree_map(lambda x: x.left + x.right if isinstance(x, cls) else x, (args, kwargs))
            return func(*plain[0], **plain[1])
        halves = [tree_map(lambda x, s=s: getattr(x, s) if isinstance(x, cls) else x, (args, kwargs)) for s in _SIDES]
        left, right = (func(*half[0], **half[1]) for half in halves)
        if isinstance(left, torch.Tensor):
            return return_and_correct_aliasing(func, args, kwargs, cls(left, right))
        if isinstance(left, (tuple, list)):
            return type(left)(cls(a, b) for a, b in zip(left, right, strict=True))
        return left

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        calls.append(f"pre {mesh.ndim}-d {tuple(outer_size)} {outer_stride} {type(module).__name__}")
        dtype = mp_policy.param_dtype or self.dtype
        return (self.left.to(dtype), self.right.to(dtype)), outer_size

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        assert not torch.is_grad_enabled()
        left, right = (output.view(metadata) for output in outputs)
        calls.append(f"post {'fills' if out is not None else 'makes'} {param_dtype}")
        if out is None:
            return Pair(left, right), (left, right)
        local = getattr(out, "_local_tensor", out)
        for mine, gathered in ((local.left, left), (local.right, right)):
            assert mine.untyped_storage().data_ptr() == gathered.untyped_storage().data_ptr()
        return None


_SIDES = ("left", "right")
_SUMMED = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.mul.Tensor,
    torch.ops.aten.add.Tensor,
}


class Scaled:
    """All-gather hooks for a plain local tensor. It is sent as int8 with one scale per row and received in fp32."""

    def __init__(self, local: torch.Tensor) -> None:
        self._local = local

    def pre(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        scale = self._local.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
        return ((self._local / scale).round().to(torch.int8), scale), None

    def post(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        values, scales = outputs
        full = values.to(param_dtype) * scales.to(param_dtype)
        if out is None:
            return full, (full,)
        out.copy_(full)
        return None

    def hang_on(self) -> None:
        patched: Any = self._local
        patched.fsdp_pre_all_gather, patched.fsdp_post_all_gather = self.pre, self.post


def with_weights(model: nn.Module, kind: Any) -> nn.Module:
    """Return ``model`` with all matrices of linear layers converted to ``kind``, as two equal halves."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            half = module.weight.detach() / 2
            module.weight = nn.Parameter(kind(half, half.clone()))
    return model


def batch_of(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
