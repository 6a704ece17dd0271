"""Memory for shards on the meta device, one tensor for each bucket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from composable_fsdp._api.torch_types import TorchFSDPModule
from composable_fsdp._core.state import states_below

__all__ = ["allocated_shards"]


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
