"""``sharded_ema`` computes the averages of the unsharded model, each rank those of its shards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from composable_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, sharded_ema
from composable_fsdp.checkpoint import Full, load, load_state_dict, save, state_dict
from composable_fsdp.errors import CheckpointError, ConfigurationError, LifecycleError, ParameterError
from tests.helpers.counted_collectives import counted_collectives
from tests.helpers.model_parallel import PAIRS, named_mesh, parallelize_pairs
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.run_ranks import run_ranks
from tests.helpers.sharding import adamw, assert_exact, full_value, values_of
from tests.helpers.transports import TRANSPORTS


def warm_up(step: int) -> float:
    return min(0.9, (1 + step) / (10 + step))


def train_both(model: nn.Module, reference: nn.Module, task: str, after: Callable[[], None], steps: int = 3) -> None:
    """Train both on the same batch, so that the reference needs no averaging over ranks."""
    ours, theirs = adamw(model.parameters()), adamw(reference.parameters())
    for step in range(steps):
        for module, optimizer in ((model, ours), (reference, theirs)):
            TASKS[task].loss(module, TASKS[task].batch_of(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        after()


def averages_alike(task: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", shape)
    reference, batch = TASKS[task].build(), TASKS[task].batch_of(7, 0)
    model = shard_layers(TASKS[task].build(), fully_shard, mesh=mesh, **options)
    expected = copy.deepcopy(reference)
    ema = sharded_ema(model, warm_up)

    def after() -> None:
        with counted_collectives() as counts:
            ema.update()
        assert not counts
        with torch.no_grad():
            for average, value in zip(expected.parameters(), reference.parameters(), strict=True):
                average.lerp_(value, 1 - warm_up(ema.steps))

    train_both(model, reference, task, after)
    assert ema.steps == 3
    wanted = dict(expected.named_parameters())
    assert list(ema.averages) == list(wanted)
    for name, average in ema.averages.items():
        parameter = model.get_parameter(name)
        assert isinstance(average, DTensor)
        assert isinstance(parameter, DTensor)
        assert (average.placements, average.device_mesh) == (parameter.placements, parameter.device_mesh)
        torch.testing.assert_close(full_value(average), wanted[name].detach())
    before = values_of(model)
    with ema.swapped():
        torch.testing.assert_close(TASKS[task].loss(model, batch), TASKS[task].loss(expected, batch))
    for name, value in values_of(model).items():
        assert_exact(value, before[name], name)
    train_both(model, reference, task, after)


@pytest.mark.parametrize(
    ("task", "shape", "options"),
    [
        ("mlp", (2,), {"reshard_after_forward": False}),
        ("tied", (2,), {"offload_policy": CPUOffloadPolicy()}),
        ("transformer", (2, 2), {}),
        ("mlp", (1,), {}),
    ],
    ids=str,
)
@pytest.mark.behaviour("A-18")
def test_averages_are_those_of_the_unsharded_model(task: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    run_ranks(averages_alike, prod(shape), task, shape, options)


def computes_with_averages(options: dict[str, Any]) -> None:
    """Check that gathered or cast parameters kept between passes are updated by a swap."""
    task = TASKS["transformer"]
    batch = task.batch_of(0, dist.get_rank())
    model, other = (shard_layers(task.build(), fully_shard, **options) for _ in range(2))
    optimizer, ema = adamw(model.parameters()), sharded_ema(model, 0.5)
    for _ in range(2):
        task.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
        with torch.no_grad():
            own = task.loss(model, batch)
            with ema.swapped():
                averaged = task.loss(model, batch)
                load_state_dict(other, state_dict(model, Full()))
            torch.testing.assert_close(averaged, task.loss(other, batch), rtol=0, atol=0)
            assert averaged != own
            torch.testing.assert_close(task.loss(model, batch), own, rtol=0, atol=0)


@pytest.mark.behaviour("A-18", "D-01")
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_swapped_model_computes_with_the_averages(reshard_after_forward: bool, transport: str) -> None:
    for dtype in (None, torch.bfloat16):
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        options = {"mp_policy": policy, "reshard_after_forward": reshard_after_forward}
        run_ranks(computes_with_averages, 2, options, environment=TRANSPORTS[transport])


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.frozen(self.norm(self.linear(x)))
        return out


def buffers_dtypes_and_errors() -> None:
    x = torch.randn(8, 4)
    trainable = ["linear.weight", "linear.bias", "norm.weight", "norm.bias"]
    model = fully_shard(Normed())
    statistics = ["norm.running_mean", "norm.running_var"]
    ema = sharded_ema(model, 0.5, average_buffers=True)
    assert list(ema.averages) == trainable + statistics
    model(x)
    first, now = torch.zeros(4), model.norm.get_buffer("running_mean").clone()
    ema.update()
    torch.testing.assert_close(ema.averages["norm.running_mean"], (first + now) / 2)

    def fail_inside() -> None:
        with ema.swapped():
            assert_exact(model.norm.get_buffer("running_mean"), (first + now) / 2, "running_mean")
            with pytest.raises(
                LifecycleError, match=r"^update\(\) was called inside swapped\(\), where the model's values are"
            ):
                ema.update()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert_exact(model.norm.get_buffer("running_mean"), now, "running_mean")

    low = fully_shard(Normed().bfloat16(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    for dtype, chosen in ((torch.float32, None), (torch.bfloat16, torch.bfloat16)):
        ema = sharded_ema(low, 0.999, dtype=chosen)
        assert list(ema.averages) == trainable, "frozen parameters have no averages"
        assert {average.dtype for average in ema.averages.values()} == {dtype}
        with torch.no_grad():
            low.linear.bias.fill_(1.0)
        before = full_value(ema.averages["linear.bias"])
        ema.update()
        expected = before.lerp(torch.ones(4, dtype=dtype), 0.001)
        torch.testing.assert_close(full_value(ema.averages["linear.bias"]), expected)
        with ema.swapped():
            assert_exact(full_value(low.linear.bias), full_value(ema.averages["linear.bias"]).bfloat16(), "linear.bias")
        assert_exact(full_value(low.linear.bias), torch.ones(4, dtype=torch.bfloat16), "linear.bias")

    for decay in (1.5, -0.1, float("nan")):
        with pytest.raises(ConfigurationError, match=rf"the decay of an average must be from 0 to 1, but is {decay}\."):
            sharded_ema(model, decay)
    ema = sharded_ema(model, lambda step: 2.0)
    with pytest.raises(ConfigurationError, match=r"must be from 0 to 1, but is 2\.0"):
        ema.update()
    assert ema.steps == 0
    with pytest.raises(ConfigurationError, match=r"averages need a floating-point dtype, not torch\.int32"):
        sharded_ema(model, 0.5, dtype=torch.int32)
    with torch.device("meta"):
        blank = fully_shard(nn.Linear(2, 2))
    with pytest.raises(ParameterError, match="sharded_ema: these are on the meta device and have no memory: weight, b"):
        sharded_ema(blank, 0.5)
    with pytest.raises(CheckpointError, match=r"the averages do not fit those of FSDPNormed.*\n.*missing \(3\)"):
        ema.load_state_dict({"steps": 1, "averages": {"linear.bias": torch.ones(4)}})
    given: dict[str, Any] = ema.state_dict()
    if dist.get_rank() == 1:
        given["averages"]["unknown"] = given["averages"].pop("linear.bias")
    with pytest.raises(CheckpointError) as raised:
        ema.load_state_dict({**given, "steps": 9})
    assert str(raised.value).splitlines()[1:] == [
        "  missing (1):",
        "    linear.bias: float32 (4,) (on rank 1)",
        "  unexpected (1):",
        "    unknown: float32 (4,) (on rank 1)",
    ]
    assert ema.steps == 0
    ema = sharded_ema(model, 0.5)
    model.linear = nn.Identity()  # type: ignore[assignment]
    with pytest.raises(ParameterError, match=r"averaged, but FSDPNormed has them no longer: \['linear\.weight"):
        ema.update()


@pytest.mark.behaviour("A-18")
def test_buffers_dtypes_and_invalid_arguments_of_averages() -> None:
    run_ranks(buffers_dtypes_and_errors, 2)


def pairs(size: int) -> nn.Module:
    """Return tensor-parallel pairs with uneven sizes on 4 ranks; placements alone do not describe their shards."""
    model = PAIRS.build()
    mesh = named_mesh(dp=size // 2, tp=2) if size == 4 else named_mesh(dp=size)
    if size == 4:
        parallelize_pairs(model, mesh["tp"])
    return shard_layers(model, fully_shard, mesh=mesh["dp"])


def save_averages(folder: str) -> dict[str, torch.Tensor]:
    model = pairs(dist.get_world_size())
    optimizer, ema = adamw(model.parameters()), sharded_ema(model, 0.75)
    for step in range(2):
        PAIRS.loss(model, PAIRS.batch_of(step, 0)).backward()
        optimizer.step()
        ema.update()
    save(folder, model, optimizer, averages=ema)
    save(f"{folder}/without", model)
    with ema.swapped():
        return state_dict(model, Full())


def load_averages(folder: str, expected: dict[str, torch.Tensor]) -> None:
    model = pairs(dist.get_world_size())
    own = values_of(model)
    ema = sharded_ema(model, 0.75)
    load(folder, model, adamw(model.parameters()), averages=ema)
    assert ema.steps == 2
    with ema.swapped():
        for name, value in state_dict(model, Full()).items():
            assert_exact(value, expected[name], name)
    assert any(not torch.equal(value, own[name]) for name, value in values_of(model).items())
    load(folder, model, adamw(model.parameters()))  # without the averages

    other = pairs(dist.get_world_size())
    copied = sharded_ema(other, 0.5)
    copied.load_state_dict(ema.state_dict())
    assert copied.steps == 2
    with copied.swapped():
        for name, value in state_dict(other, Full()).items():
            assert_exact(value, expected[name], name)
    load_state_dict(other, expected)
    copied.load_state_dict({"steps": 5, "averages": expected})
    assert copied.steps == 5

    wider = sharded_ema(model, 0.75, dtype=torch.float64)
    with pytest.raises(CheckpointError, match=r"average of head\.bias: float32, expected float64"):
        load(folder, model, averages=wider)
    with pytest.raises(CheckpointError, match=r"the checkpoint has no averages\."):
        load(f"{folder}/without", model, averages=ema)


@pytest.mark.behaviour("A-18")
@pytest.mark.parametrize(("saved", "loaded"), [(2, 4), (4, 2), (2, 1)])
def test_averages_are_in_the_checkpoint_for_any_number_of_ranks(tmp_path: Path, saved: int, loaded: int) -> None:
    expected, *_ = run_ranks(save_averages, saved, str(tmp_path))
    run_ranks(load_averages, loaded, str(tmp_path), expected)
