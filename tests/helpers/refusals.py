"""Checks that a fully_shard call that raises leaves the module unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from composable_fsdp import fully_shard


def state_of(module: nn.Module) -> list[Any]:
    """Return everything that ``fully_shard`` could change in a tree of modules."""
    return [
        (
            name,
            type(m),
            sorted(vars(m)),
            {key: len(value) for key, value in vars(m).items() if "hooks" in key and value is not None},
            {key: (id(t), type(t), is_lazy(t) or t.data_ptr(), t.device, t.requires_grad) for key, t in tensors_of(m)},
        )
        for name, m in module.named_modules()
    ]


def tensors_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(key, t) for key, t in [*module._parameters.items(), *module._buffers.items()] if t is not None]


def assert_refused(
    error: type[Exception], match: str, module: Any, *, within: nn.Module | None = None, **options: Any
) -> None:
    """Check that ``fully_shard(module, **options)`` raises and changes neither the module nor the model ``within``."""
    tree = within if within is not None else module
    before = state_of(tree) if isinstance(tree, nn.Module) else None
    with pytest.raises(error, match=match):
        fully_shard(module, **options)
    if before is not None:
        assert state_of(tree) == before
