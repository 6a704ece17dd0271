"""Checks torch's unmodified pipelining: stages that this library shards train as torch's, and as the unsharded model.

The tests use two pipeline ranks times two data-parallel ranks. Stages reduce no gradients until the last microbatch.
The pipeline schedule then starts the reductions: by ``finalize_backward`` from torch 2.15 on, through private
attributes of torch's FSDP state before.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as peer
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.testing import assert_close
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

import composable_fsdp as ours
from composable_fsdp import trace
from tests.helpers.models import seeded
from tests.helpers.run_ranks import on_ranks, run_ranks

pytestmark = pytest.mark.behaviour("I-01", "I-02")

WIDTH = 6
STEPS = 3
MICROBATCHES = 4
SCHEDULES: dict[str, type[PipelineScheduleSingle] | type[PipelineScheduleMulti]] = {
    "1F1B": Schedule1F1B,
    "GPipe": ScheduleGPipe,
    "interleaved 1F1B": ScheduleInterleaved1F1B,
    "interleaved zero bubble": ScheduleInterleavedZeroBubble,
}

V_SHAPED = {"zero bubble V": ScheduleZBVZeroBubble, "DualPipeV": ScheduleDualPipeV}
"""Their first rank has the first stage and the last one."""
BF16 = ours.MixedPrecisionPolicy(torch.bfloat16, torch.float32, grad_dtype=torch.float32)

ADAMW = partial(torch.optim.AdamW, lr=1e-2, foreach=False)
SGD = partial(torch.optim.SGD, lr=0.1)

Shard = Callable[..., Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def chain() -> nn.Module:
    return nn.Sequential(*[Block() for _ in range(8)])


def batch_of(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    x, target = torch.randn(2, 2 * MICROBATCHES, WIDTH, generator=generator)
    return x, target


def indices_of(schedule: str, pp: DeviceMesh) -> list[int]:
    """Return the indices of this rank's stages: two of a schedule of several stages, else one."""
    rank, ranks = pp.get_local_rank(), pp.size()
    if schedule in V_SHAPED:
        return [rank, 2 * ranks - 1 - rank]
    stages = 2 * ranks if issubclass(SCHEDULES[schedule], PipelineScheduleMulti) else ranks
    return list(range(rank, stages, ranks))


def train(
    shard: Shard,
    schedule: str,
    mesh: DeviceMesh,
    *,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = ADAMW,
    prepare: Callable[[list[Any]], object] = list,
    schedule_options: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> tuple[list[float], list[nn.Sequential]]:
    """Train and return the losses (on the rank of the last stage) and this rank's stages, of sharded blocks.

    ``prepare`` gets the sharded stages. The dims of ``mesh`` after ``pp`` are those of data parallelism.
    """
    model: Any = seeded(chain)()
    names: Any = mesh.mesh_dim_names
    pp, dp = mesh["pp"], mesh[names[1:]]
    indices = indices_of(schedule, pp)
    size = len(model) // (pp.size() * len(indices))
    modules = [nn.Sequential(*model[index * size : (index + 1) * size]) for index in indices]
    for module in modules:
        for each in (*module, module):
            shard(each, mesh=dp, **options)
    prepare(modules)
    stages: Any = [
        PipelineStage(module, index, pp.size() * len(indices), torch.device("cpu"), group=pp.get_group())
        for index, module in zip(indices, modules, strict=True)
    ]
    kind: Any = (SCHEDULES | V_SHAPED)[schedule]
    run = kind(stages if len(stages) > 1 else stages[0], MICROBATCHES, loss_fn=loss_of, **schedule_options)
    optimizer = make_optimizer([p for module in modules for p in module.parameters()])
    losses: list[float] = []
    for step in range(STEPS):
        x, target = batch_of(step, mesh.get_rank() % dp.size())
        of_step: list[torch.Tensor] = []
        run.step(*([x] if pp.get_local_rank() == 0 else []), target=target, losses=of_step)
        losses += [loss.item() for loss in of_step]
        optimizer.step()
        optimizer.zero_grad()
    return losses, modules


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output.float(), target)


def full_parameters(stages: list[nn.Sequential]) -> list[torch.Tensor]:
    return [p.full_tensor() for stage in stages for p in stage.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(4)
def test_a_pipeline_of_sharded_stages_trains_as_with_torch(schedule: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    with trace.Recorder() as recorder:
        losses, stages = train(ours.fully_shard, schedule, mesh, reshard_after_forward=False)
    expected_losses, expected = train(peer.fully_shard, schedule, mesh, reshard_after_forward=False)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert len(losses) == (STEPS * MICROBATCHES if mesh["pp"].get_local_rank() == 1 else 0)
    assert_close(full_parameters(stages), full_parameters(expected))
    reductions = [str(event) for event in recorder if event.operation is trace.Operation.REDUCE]
    assert len(reductions) == STEPS * 4, "each of 4 blocks reduces once per step, not once per microbatch"


def unsharded(dtype: torch.dtype) -> Any:
    model: Any = seeded(chain)()
    optimizer = SGD(model.parameters())
    for step in range(STEPS):
        for replica in range(2):
            for x, target in zip(*(each.chunk(MICROBATCHES) for each in batch_of(step, replica)), strict=True):
                computing = copy.deepcopy(model).to(dtype)
                computing.zero_grad()
                loss_of(computing(x.to(dtype)), target).backward()
                for parameter, computed in zip(model.parameters(), computing.parameters(), strict=True):
                    gradient = computed.grad.float() / (2 * MICROBATCHES)
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        optimizer.step()
        optimizer.zero_grad()
    return model


def compare_with_unsharded(schedule: str, schedule_options: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    indices = indices_of(schedule, mesh["pp"])
    for policy in (ours.MixedPrecisionPolicy(), BF16):
        options: Any = {"mp_policy": policy, "reshard_after_forward": False, "schedule_options": schedule_options}
        _, stages = train(ours.fully_shard, schedule, mesh, make_optimizer=SGD, **options)
        model = unsharded(policy.param_dtype or torch.float32)
        size = len(model) // (2 * len(indices))
        expected = [p for index in indices for p in model[index * size : (index + 1) * size].parameters()]
        assert_close(full_parameters(stages), [p.detach() for p in expected], rtol=1e-5, atol=1e-6)


sends_to_itself = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13",
    reason="stages of one rank send to each other, which gloo of torch 2.11 cannot, with unsharded stages either",
)


@pytest.mark.parametrize("schedule", [*SCHEDULES, *(pytest.param(each, marks=sends_to_itself) for each in V_SHAPED)])
def test_a_pipeline_of_sharded_stages_trains_as_the_unsharded_model(schedule: str) -> None:
    run_ranks(compare_with_unsharded, 4, schedule, {})


needs_2_15 = pytest.mark.skipif(TorchVersion(torch.__version__) < "2.15", reason="torch 2.15 brings the option")


@needs_2_15
@pytest.mark.parametrize("schedule", ["interleaved 1F1B", "interleaved zero bubble", *V_SHAPED])
def test_waits_for_gradients_of_stages_can_be_deferred(schedule: str) -> None:
    run_ranks(compare_with_unsharded, 4, schedule, {"defer_reduce_grad_wait": True})


def share_streams() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    deferred = {"defer_reduce_grad_wait": True}
    with pytest.raises(ValueError, match="share a communication context") as caught:
        train(ours.fully_shard, "interleaved 1F1B", mesh, prepare=ours.share_comm_ctx, schedule_options=deferred)
    return str(caught.value)


@needs_2_15
def test_waits_of_stages_that_share_a_communication_context_cannot_be_deferred() -> None:
    for rank, text in enumerate(run_ranks(share_streams, 4)):
        assert text.endswith(f"share_comm_ctx() for stages {rank // 2} and {rank // 2 + 2}")


class Counted(TorchDispatchMode):
    """Counts collectives. ``CommDebugMode`` sets hooks with which torch's pipelining fails, also with torch's FSDP2."""

    observes_sharding = True

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name()] += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("shape", "schedule", "reshard"),
    [
        ((2, 2), "1F1B", False),
        ((2, 2), "interleaved 1F1B", True),
        ((1, 2, 2), "GPipe", False),
        pytest.param((1, 2, 2), "interleaved 1F1B", True, marks=sends_to_itself),
        ((1, 4), "1F1B", 2),
    ],
)
@on_ranks(4)
def test_a_pipeline_has_the_collectives_of_fsdp2(shape: tuple[int, ...], schedule: str, reshard: int | bool) -> None:
    """Compare the collectives of all steps with torch's. Ours fuses no groups, as torch."""
    names = ("pp", "replicate", "shard") if len(shape) == 3 else ("pp", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    counts, losses = [], list[list[float]]()
    for library in (ours, peer):

        def prepare(stages: list[Any], has_schedule: bool = library is ours) -> None:
            for stage in stages if has_schedule else ():
                stage.set_schedule(max_fused_bytes=0)

        with Counted() as mode:
            losses += train(library.fully_shard, schedule, mesh, prepare=prepare, reshard_after_forward=reshard)[:1]
        counts.append(+mode.counts)
    assert counts[0] == counts[1]
    assert counts[0]["c10d::_allgather_base_"] > 0
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@on_ranks(4)
def test_weights_that_a_schedule_does_not_find_are_reported() -> None:
    """Check that groups that lost the gradients of all microbatches warn, here the groups of the last stage."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(ours.fully_shard, "interleaved zero bubble", mesh)
    if mesh["pp"].get_local_rank() == 1:
        texts = [str(each.message) for each in caught if "left no gradient" in str(each.message)]
        assert texts
        assert texts[0].startswith(("backward went through '0', but left", "backward went through '1', but left")), (
            texts
        )
        assert texts[0].endswith("shard their stages with reshard_after_forward=False.")
