"""Second derivatives through torch's tensor parallelism, of which torch itself loses a part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.helpers.model_parallel import PAIRS, named_mesh, parallelize_pairs, sharded_pairs
from tests.helpers.run_ranks import on_ranks


def penalty(model: nn.Module, seed: int) -> torch.Tensor:
    """Return a gradient penalty, whose backward has second derivatives."""
    torch.manual_seed(seed)
    x = torch.randn(3, 5, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return gradient.square().sum()


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, Any] = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="looked at in torch 2.13")
@on_ranks(4)
def test_torch_loses_second_derivatives_through_tensor_parallelism() -> None:
    """If the last line fails, torch has mended it: take it off docs/upstream.md."""
    mesh = named_mesh(dp=2, tp=2)
    whole, parallel, sharded = PAIRS.build(), PAIRS.build(), sharded_pairs(mesh)
    parallelize_pairs(parallel, mesh["tp"])
    for model in (whole, parallel):
        (torch.stack([penalty(model, seed) for seed in range(2)]).sum() / 2).backward()
    penalty(sharded, mesh["dp"].get_local_rank()).backward()
    expected, of_torch, ours = map(full_gradients, (whole, parallel, sharded))
    torch.testing.assert_close(ours, of_torch)  # without this library, the gradients are the same
    assert not torch.allclose(of_torch["layers.0.up.weight"], expected["layers.0.up.weight"], rtol=0.01)
