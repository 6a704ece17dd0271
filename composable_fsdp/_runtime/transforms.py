"""Tensors inside the transforms of ``torch.func`` and inside dual numbers, where each level has a graph of its own.

A level wraps the tensors of the levels outside it, and a tensor of a forward-mode level has a tangent, which is a
tensor of the level outside. So ``requires_grad`` and ``grad_fn`` of one tensor show the graph of one level only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

__all__ = ["dual_numbers", "layers_of"]

_functorch: Any = torch._C._functorch
dual_numbers: Any = forward_ad
"""The module with the level of dual numbers, ``_current_level``, which is -1 outside of one."""


def layers_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return ``tensor``, its tangents, and the tensors that any of them wraps, of all levels."""
    return [tensor, *_inside(tensor)]


def _inside(tensor: torch.Tensor) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    top = _functorch.peek_interpreter_stack()
    if forward_ad._current_level >= 0 and (top is None or top.key() == _functorch.TransformType.Jvp):
        tangent = forward_ad.unpack_dual(tensor).tangent
        if tangent is not None:
            found += layers_of(tangent)
    if not _functorch.is_functorch_wrapped_tensor(tensor):
        return found
    if top is None or top.level() < _functorch.maybe_get_level(tensor):  # its level has ended, as for a vjp function
        return found + layers_of(_functorch.get_unwrapped(tensor))
    level = top.level()
    left = _functorch.pop_dynamic_layer_stack()  # tangents of the level outside can only be read there
    try:
        is_of_level = _functorch.maybe_get_level(tensor) == level
        return found + (layers_of(_functorch.get_unwrapped(tensor)) if is_of_level else _inside(tensor))
    finally:
        _functorch.push_dynamic_layer_stack(left)
