"""Calls that bypass the module's ``__call__``: ``forward``, registered methods, under checkpoints."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from composable_fsdp import MixedPrecisionPolicy, fully_shard
from composable_fsdp.trace import Recorder
from tests.helpers.assert_trace import assert_trace, ledger
from tests.helpers.models import TASKS, Chain, seeded, shard_layers
from tests.helpers.run_ranks import on_ranks
from tests.helpers.training import check_parity


class Direct(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer.forward(x))
        return x


def play_directly(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Alternate ``model(x)`` and ``model.forward(x)``, which are equivalent."""
    x, target = TASKS["chain"].batch_of(step, rank)
    loss: torch.Tensor = ((model if step % 2 else model.forward)(x) - target).square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.behaviour("C-08")
@pytest.mark.parametrize(("world_size", "reshard"), [(1, None), (2, True), (2, None), (4, 2)])
@on_ranks("world_size")
def test_forward_may_be_called_directly(reshard: bool | int | None) -> None:
    for build in (seeded(Direct), TASKS["chain"].build):
        with Recorder() as recorder:
            check_parity(build, play_directly, reshard_after_forward=reshard)
        assert ledger(recorder) == {}
    model = shard_layers(seeded(Direct, depth=1)(), fully_shard)
    x = torch.ones(1, 8)
    with Recorder() as recorder:
        model.forward(x)
    assert_trace(
        (e for e in recorder if e.group == "layers.0"), "unshard layers.0", "wait layers.0", "reshard layers.0"
    )
    low = fully_shard(nn.Linear(8, 8), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert low.forward(x).dtype is torch.bfloat16  # cast once, as in a call
    with pytest.raises(RuntimeError):
        model.forward(torch.ones(1, 3))
    torch.testing.assert_close(model.forward(x), model(x))  # a failed call leaves no state
