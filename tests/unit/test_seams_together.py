"""Features of several plugins in one forward, on ranks that are simulated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from composable_fsdp import fully_shard, sharded_rng, unsharded_params
from composable_fsdp.errors import LifecycleError, UnsupportedError
from tests._internals import ParameterState, root_of, state_of
from tests.helpers.sharding import fake_ranks

WIDTH = 8


@pytest.fixture(params=[0, 1])
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    with fake_ranks(2, request.param):
        yield request.param


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index != 1 or not self.skips:
                x = layer(x)
        return x


def skipping(*, reshard: bool) -> Any:
    mesh, model = init_device_mesh("cpu", (2,)), Skipping()
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    return model


@pytest.mark.behaviour("C-03")
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.usefixtures("rank")
def test_functional_call_leaves_a_skipped_module_as_it_was(reshard: bool) -> None:
    model, x = skipping(reshard=reshard), torch.ones(2, WIDTH)
    values = {name: torch.ones_like(value) for name, value in Skipping().named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    for unshards in (False, True):
        optimizer.step()
        if unshards:
            model.layers[1].unshard()
        model.skips = True
        with torch.no_grad():
            functional_call(model, values, (x,))
        group, weight = state_of(model.layers[1]).group, model.layers[1].weight
        if group.parameter_state is ParameterState.SHARDED:
            assert isinstance(weight, DTensor)
        else:
            assert weight is group.parameters[0].unsharded or isinstance(weight, DTensor)
            assert isinstance(weight, DTensor) or weight.untyped_storage().nbytes()
        assert all(isinstance(value, DTensor) for value in model.state_dict().values())
        model.skips = False
        model(x).sum().backward()


@pytest.mark.usefixtures("rank")
def test_functional_call_does_not_change_the_schedule_of_the_next_step() -> None:
    mesh, model = init_device_mesh("cpu", (2,)), Skipping()
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    sharded: Any = model
    x, values = torch.ones(2, WIDTH), {name: torch.ones_like(value) for name, value in Skipping().named_parameters()}
    for _ in range(2):
        sharded(x).sum().backward()

    def of_layers() -> list[str]:
        """Return all lines but that of the root, which is kept or not."""
        return [line for line in str(sharded.schedule()).splitlines() if "forward layers" in line]

    before = of_layers()
    with torch.no_grad():
        functional_call(sharded, values, (x,))
    assert any(state_of(layer).keeps_unsharded is not None for layer in sharded.layers)
    assert of_layers() == before


@pytest.mark.behaviour("C-03")
@pytest.mark.usefixtures("rank")
def test_ranks_that_skip_the_last_module_keep_the_same_groups_on_streams() -> None:
    """Else those that run it would keep it for backward, and the others gather it again."""
    model, x = skipping(reshard=True), torch.ones(2, WIDTH)
    model.layers[2], model.layers[1] = model.layers[1], model.layers[2]
    for _ in range(3):
        model(x).sum().backward()
    root = root_of(state_of(model))
    root.launcher.has_streams = True
    model(x)
    assert not any(run.keep for run in root.planner._plan_of(root.planner.last_known, None).forward)


@pytest.mark.behaviour("C-14")
@pytest.mark.usefixtures("rank")
def test_weights_tied_with_another_root_cannot_be_gathered_while_they_are_full() -> None:
    mesh = init_device_mesh("cpu", (2,))
    embedding, head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
    head.weight = embedding.weight
    fully_shard(embedding, mesh=mesh)
    fully_shard(head, mesh=mesh, shared_from=[embedding])
    x = torch.ones(2, WIDTH)
    with torch.no_grad():
        embedding(x)
        head(x)
        refused = pytest.raises(LifecycleError, match=r"^group 'root' is LENT, and cannot be unsharded\.")
        with unsharded_params(embedding, rank0_only=True, writeback=False), refused:
            head(x)
        head(x)


@pytest.mark.behaviour("B-03")
@pytest.mark.usefixtures("rank")
def test_random_values_of_a_local_tensor_are_refused_also_on_the_rank_that_holds_all_rows() -> None:
    model: Any = fully_shard(nn.Linear(WIDTH, 1, bias=False), mesh=init_device_mesh("cpu", (2,)))
    refused = pytest.raises(UnsupportedError, match=r"aten::normal_ was called on the local tensor of a sharded")
    with torch.no_grad(), sharded_rng(model, seed=0), refused:
        model.weight.to_local().normal_()
