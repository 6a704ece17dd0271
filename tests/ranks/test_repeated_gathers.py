"""An all-gather that repeats in every step is prepared once, and again after a change."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import fully_shard
from tests._internals import ParameterState, state_of
from tests.helpers.models import TASKS, seeded, shard_layers
from tests.helpers.run_ranks import on_ranks
from tests.helpers.sharding import values_of
from tests.helpers.transports import TRANSPORTS

CHAIN = TASKS["chain"]


@pytest.mark.behaviour("C-01")
@on_ranks(2, transports=TRANSPORTS)
def test_replaced_parameters_of_one_group_among_several_are_gathered() -> None:
    """Replace parameters after fused steps; the tensors of other groups are unchanged."""
    model, reference = seeded(CHAIN.build)(), seeded(CHAIN.build)()
    shard_layers(model, fully_shard)
    batch = CHAIN.batch_of(0, dist.get_rank())
    for _ in range(3):
        CHAIN.loss(model, batch).backward()
    for each in (model, reference):
        last = list(each.get_submodule("layers").children())[-1]
        state = {name: value * 3 for name, value in values_of(last).items()}
        last.load_state_dict(state, assign=True)
    torch.testing.assert_close(CHAIN.loss(model, batch), CHAIN.loss(reference, batch))


@pytest.mark.behaviour("C-01")
@on_ranks(4)
def test_a_group_without_parameters_is_unsharded_from_its_smaller_mesh() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    mesh = init_device_mesh("cpu", (4,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=2)
    for _ in range(2):
        output = model(torch.randn(2, 8))
        assert state_of(model).group.parameter_state is ParameterState.SHRUNK
        output.sum().backward()
        assert state_of(model).group.parameter_state is ParameterState.SHARDED
