"""torch's ``AveragedModel`` of a sharded model averages as that of the unsharded model, and is saved as a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from composable_fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from composable_fsdp.checkpoint import Full, load, load_state_dict, save, state_dict
from tests.helpers.counted_collectives import counted_collectives
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.run_ranks import on_ranks
from tests.helpers.sharding import adamw, assert_exact, full_value
from tests.helpers.transports import TRANSPORTS


def averages_of(model: nn.Module) -> Any:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75))


def reshard(model: nn.Module) -> None:
    """Free what a forward without backward has left unsharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def train_both(model: nn.Module, reference: nn.Module, task: str, after: Callable[[], None], steps: int = 3) -> None:
    """Train both on the same batch, so that the reference needs no averaging over ranks."""
    ours, theirs = adamw(model.parameters()), adamw(reference.parameters())
    for step in range(steps):
        for module, optimizer in ((model, ours), (reference, theirs)):
            TASKS[task].loss(module, TASKS[task].batch_of(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        after()


@pytest.mark.parametrize(
    ("task", "shape", "options"),
    [
        ("mlp", (2,), {"reshard_after_forward": False}),
        ("tied", (2,), {"offload_policy": CPUOffloadPolicy()}),
        ("transformer", (2, 2), {}),
    ],
    ids=str,
)
@pytest.mark.behaviour("A-18")
@on_ranks("shape")
def test_averages_are_those_of_the_unsharded_model(task: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", shape)
    reference, batch = TASKS[task].build(), TASKS[task].batch_of(7, 0)
    model: Any = shard_layers(TASKS[task].build(), fully_shard, mesh=mesh, **options)
    found, expected = averages_of(model), averages_of(reference)

    def after() -> None:
        with counted_collectives() as counts:
            found.update_parameters(model)
        assert not counts
        expected.update_parameters(reference)

    train_both(model, reference, task, after)
    with torch.no_grad():
        torch.testing.assert_close(TASKS[task].loss(found.module, batch), TASKS[task].loss(expected.module, batch))
    reshard(found.module)
    train_both(model, reference, task, after)
    assert int(found.n_averaged) == 6
    wanted = dict(expected.module.named_parameters())
    assert [name for name, _ in found.module.named_parameters()] == list(wanted)
    for name, average in found.module.named_parameters():
        parameter: Any = model.get_parameter(name)
        assert (average.placements, average.device_mesh) == (parameter.placements, parameter.device_mesh)
        torch.testing.assert_close(full_value(average), wanted[name].detach())


def computes_with_averages(options: dict[str, Any]) -> None:
    """Check that gathered or cast parameters kept between passes follow an update."""
    task = TASKS["transformer"]
    batch = task.batch_of(0, dist.get_rank())
    model, other = (shard_layers(task.build(), fully_shard, **options) for _ in range(2))
    optimizer, averaged = adamw(model.parameters()), averages_of(model)
    for _ in range(3):
        task.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
        load_state_dict(other, state_dict(averaged.module, Full()))
        with torch.no_grad():
            torch.testing.assert_close(task.loss(averaged.module, batch), task.loss(other, batch), rtol=0, atol=0)
        reshard(averaged.module)


@pytest.mark.behaviour("A-18", "D-01")
@on_ranks(2, transports=TRANSPORTS)
def test_an_averaged_model_computes_with_the_averages() -> None:
    for dtype in (None, torch.bfloat16):
        for reshard in (True, False):
            policy = MixedPrecisionPolicy(param_dtype=dtype)
            computes_with_averages({"mp_policy": policy, "reshard_after_forward": reshard})


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.norm(self.linear(x)))


@pytest.mark.behaviour("A-18")
@on_ranks(2)
def test_averages_of_buffers_and_of_narrow_parameters(tmp_path: Path) -> None:
    model = fully_shard(Normed())
    averaged = AveragedModel(model, avg_fn=get_ema_avg_fn(0.5), use_buffers=True)
    averaged.update_parameters(model)
    model(torch.randn(8, 4))
    reshard(model)
    averaged.update_parameters(model)
    mean = model.norm.get_buffer("running_mean") / 2
    torch.testing.assert_close(averaged.module.get_buffer("norm.running_mean"), mean)

    low = fully_shard(Normed().bfloat16())
    wide = AveragedModel(low, avg_fn=get_ema_avg_fn(0.999))
    wide.module.float()
    wide.update_parameters(low)
    with torch.no_grad():
        low.linear.bias.fill_(1.0)
    before = full_value(wide.module.get_parameter("linear.bias"))
    wide.update_parameters(low)
    torch.testing.assert_close(full_value(wide.module.get_parameter("linear.bias")), before * 0.999 + 0.001)
    save(tmp_path, wide)
    fresh = AveragedModel(low)
    fresh.module.float()
    load(tmp_path, fresh)
    assert int(fresh.n_averaged) == 2
    for name, value in state_dict(fresh.module, Full()).items():
        assert_exact(value, state_dict(wide.module, Full())[name], name)
