"""Conversions of sharded modules, such as ``to`` and ``to_empty``: what must stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from composable_fsdp._core.group import ParamGroup
from composable_fsdp._core.group_plan import HELD_GRADIENTS

__all__ = ["gradients_keep_their_dtype", "takes_conversion"]


def takes_conversion(group: ParamGroup, convert: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Return False if gradients are held and ``convert`` changes no parameter, so that these must be left out.

    Raises:
        LifecycleError: ``to`` and the like would lose gradients; or the user has changed ``grad_dtype`` after sharding.
    """
    group.check_grad_dtypes()
    with torch.no_grad():
        if group.gradient_state in HELD_GRADIENTS and all(convert(p.local) is p.local for p in group.parameters):
            return False
    group.check_nothing_held()
    return True


@contextmanager
def gradients_keep_their_dtype(group: ParamGroup) -> Iterator[None]:
    """Take off gradients whose dtype was chosen by ``grad_dtype``, so that ``to`` converts them to no other."""
    gradients = {p: gradient for p in group.parameters if p.has_grad_dtype and (gradient := p.sharded.grad) is not None}
    for parameter in gradients:
        parameter.sharded.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.sharded.grad_dtype = parameter.grad_dtype  # a conversion resets it
            parameter.sharded.grad = gradient.to(parameter.sharded.device)
