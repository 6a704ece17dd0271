"""Conversions of sharded modules, such as ``to`` and ``to_empty``: memory for shards on meta, and what must stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from composable_fsdp._api.torch_types import TorchFSDPModule
from composable_fsdp._core.group import ParamGroup
from composable_fsdp._core.group_plan import HELD_GRADIENTS
from composable_fsdp._core.state import states_below

__all__ = ["allocated_shards", "gradients_keep_their_dtype", "takes_conversion"]


@contextmanager
def allocated_shards(module: nn.Module, device: torch.device | None) -> Iterator[None]:
    """Allocate shards of ``module`` that are on meta, without values, and hide their parameters in this context.

    ``module._apply`` in the context then converts the other tensors. Parameters that it must replace one by one stay:
    those of modules that share memory between ranks, and all of a model whose classes override ``_apply`` or
    ``__setattr__``, which may read parameters.

    Args:
        module: contains sharded modules, or none.
        device: the device of the shards; ``None`` is where each rests between steps.
    """
    with ExitStack() as hidden:
        if not any(map(_follows_parameters, {type(each) for each in module.modules()})):
            for state in states_below(module):
                if state.group.allocate(device):
                    hidden.enter_context(state.group.registration.hidden())
        yield


def _follows_parameters(kind: type[nn.Module]) -> bool:
    """Return True if ``kind`` may act on parameters that are replaced."""
    known = (nn.Module, object, TorchFSDPModule)
    others = (base for base in kind.__mro__ if base not in known and not issubclass(base, TorchFSDPModule))
    return any("_apply" in vars(base) or "__setattr__" in vars(base) for base in others)


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
