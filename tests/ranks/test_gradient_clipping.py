"""Test gradient clipping and scaling on all meshes and placements, compared with torch on plain tensors."""

from __future__ import annotations

from math import inf, isnan, nan
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing import assert_close

from composable_fsdp import FSDPModule, clip_grad_norm_, fully_shard, get_total_norm
from composable_fsdp.errors import GradientError, MeshError
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.sharding import full_value
from tests.helpers.training import Run, assert_equal_runs, copy_on_cpu

NORM_TYPES = (2.0, 1.0, 3.5, inf)
Where = tuple[DeviceMesh, tuple[Placement, ...]] | None


def make_values(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def make_parameters(fulls: list[torch.Tensor], places: list[Where]) -> list[Any]:
    """Return parameters with the gradients ``fulls``, placed by ``places``. ``None`` means a plain tensor."""
    parameters: list[Any] = []
    for full, place in zip(fulls, places, strict=True):
        gradient = full.clone() if place is None else distribute_tensor(full, *place, src_data_rank=None)
        parameters.append(nn.Parameter(torch.zeros_like(gradient)))
        parameters[-1].grad = gradient
    return parameters


def gather_from_every_rank(value: torch.Tensor) -> list[torch.Tensor]:
    everyone = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, value)
    return everyone


def check_against_torch(fulls: list[torch.Tensor], places: list[Where]) -> None:
    for norm_type in NORM_TYPES:
        for limit in (0.37, 1e6):
            for foreach in (None, False):
                parameters, reference = make_parameters(fulls, places), make_parameters(fulls, [None] * len(fulls))
                total = get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
                norm = clip_grad_norm_(parameters, limit, norm_type, foreach=foreach)
                expected = nn.utils.clip_grad_norm_([p for p in reference if p.numel()], limit, norm_type)
                assert type(norm) is torch.Tensor
                assert (norm.shape, norm.dtype) == ((), torch.float32)
                assert_close(norm, expected)
                assert torch.equal(total, norm)
                assert all(torch.equal(norm, other) for other in gather_from_every_rank(norm))
                for ours, theirs, place in zip(parameters, reference, places, strict=True):
                    assert theirs.grad is not None
                    assert place is None or (isinstance(ours.grad, DTensor) and ours.grad.placements == place[1])
                    assert_close(full_value(ours.grad), theirs.grad)


@pytest.mark.behaviour("C-11")
@on_ranks(2, 4)
def test_one_axis_with_uneven_and_empty_shards() -> None:
    world = init_device_mesh("cpu", (dist.get_world_size(),))
    fulls = make_values((8, 3), (5, 2), (1, 7), (3,), (2, 6), (0, 4), ())
    rows = (world, (Shard(0),))
    check_against_torch(fulls, [rows, rows, rows, rows, (world, (Shard(1),)), rows, (world, (Replicate(),))])
    check_against_torch(fulls, [rows, None, (world, (Replicate(),)), None, rows, None, None])
    check_against_torch(fulls[2:3], [rows])  # only the first rank has a nonempty shard
    check_against_torch(fulls[:1], [None])


@pytest.mark.behaviour("C-11")
@on_ranks(4)
def test_tensors_on_different_meshes_count_once_each_in_one_call() -> None:
    world, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))  # the same ranks in other process groups
    tall = init_device_mesh("cpu", (4, 1), mesh_dim_names=("x", "y"))
    crossed = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]))
    keep, rows, columns = Replicate(), Shard(0), Shard(1)
    strided = _StridedShard(0, split_factor=2)
    places: list[Where] = [
        (grid, (keep, rows)),
        (world, (rows,)),
        (grid["tp"], (columns,)),
        (grid["dp"], (rows,)),
        (grid, (strided, rows)),
        (grid, (rows, columns)),
        None,
        (crossed, (rows, columns)),
        (other, (columns, rows)),
        (other["b"], (rows,)),
        (tall, (rows, rows)),
        (grid, (keep, keep)),
        (grid, (strided, columns)),
        (grid, (keep, rows)),
    ]
    shapes = [(5, 3), (6, 2), (2, 3), (1, 4), (8, 2), (3, 5), (4,), (5, 5), (3, 3), (7,), (3, 2), (2, 2), (8, 3), (1,)]
    fulls = make_values(*shapes)
    check_against_torch(fulls, places)
    check_against_torch(fulls[::-1], places[::-1])


@pytest.mark.behaviour("C-11", "C-16")
@on_ranks(2)
def test_pending_sums_are_done_before_the_norm() -> None:
    world = init_device_mesh("cpu", (dist.get_world_size(),))
    (full,) = make_values((3, 4))
    for norm_type in NORM_TYPES:
        parameter = nn.Parameter(distribute_tensor(torch.zeros(3, 4), world, (Replicate(),)))
        parameter.grad = DTensor.from_local(full * (dist.get_rank() + 1), world, (Partial(),), run_check=False)
        ranks = dist.get_world_size()
        expected = full * (ranks * (ranks + 1) // 2)
        norm = clip_grad_norm_(parameter, 0.5, norm_type)
        assert_close(norm, torch.linalg.vector_norm(expected, norm_type))
        assert_close(full_value(parameter.grad), expected * (0.5 / norm))


@pytest.mark.behaviour("C-11")
@on_ranks(2)
def test_norms_of_half_precision_gradients_are_float32() -> None:
    world = init_device_mesh("cpu", (2,))
    rows: Where = (world, (Shard(0),))
    for dtype in (torch.float16, torch.bfloat16):
        (full,) = make_values((5, 40), dtype=dtype)
        full *= 300  # its squares overflow float16
        (parameter,) = make_parameters([full], [rows])
        norm = clip_grad_norm_([parameter], 1.0)
        assert norm.dtype is torch.float32
        assert_close(norm, full.float().norm())
        assert parameter.grad.dtype is dtype
        assert_close(full_value(parameter.grad).float(), full.float() / norm, rtol=1e-2, atol=1e-5)
    large, small = make_values((3, 3), (3, 3))
    total = get_total_norm([distribute_tensor(large * 1e18, world, [Shard(0)]), small.double()])
    assert total.dtype is torch.float64
    assert_close(total, (large * 1e18).double().norm())


@pytest.mark.behaviour("C-11")
@on_ranks(2)
def test_parameters_without_gradients_change_nothing_on_any_rank() -> None:
    world, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    rows: Where = (world, (Shard(0),))
    assert torch.equal(clip_grad_norm_([], 1.0), torch.tensor(0.0))
    assert torch.equal(get_total_norm([]), torch.tensor(0.0))
    for norm_type in NORM_TYPES:
        first, second, third = make_parameters(make_values((3, 2), (4,), (2,)), [rows, rows, None])
        first.grad = None
        norm = clip_grad_norm_([first, second, third], 1e6, norm_type)
        plain = make_values((3, 2), (4,), (2,))[1:]
        assert_close(norm, nn.utils.get_total_norm(plain, norm_type))
        second.grad = third.grad = None
        assert clip_grad_norm_([first, second, third], 1.0, norm_type) == 0
        # Only one rank has this gradient: the other rank's shard counts as zeros.
        (lone,) = make_parameters(make_values((4, 3)), [rows])
        shard = make_values((4, 3))[0][:2]
        if rank == 1:
            lone.grad = None
        assert_close(clip_grad_norm_([lone], 1e6, norm_type), torch.linalg.vector_norm(shard, norm_type))
    with pytest.warns(UserWarning, match="exhausted generator"):
        clip_grad_norm_(nn.ReLU().parameters(), 1.0)


@pytest.mark.behaviour("C-11")
@on_ranks(2)
def test_a_norm_that_is_not_finite_is_so_on_every_rank_and_an_error_if_asked() -> None:
    world, messages = init_device_mesh("cpu", (2,)), []
    for bad in (nan, inf, -inf):
        for row in range(3):
            for norm_type in NORM_TYPES:
                (full,) = make_values((3, 2))
                full[row, 1] = bad
                (parameter,) = make_parameters([full], [(world, (Shard(0),))])
                before = full_value(parameter.grad) if parameter.grad is not None else None
                with pytest.raises(GradientError) as error:
                    clip_grad_norm_([parameter], 1.0, norm_type, error_if_nonfinite=True)
                messages.append(str(error.value))
                with pytest.raises(RuntimeError):
                    get_total_norm([parameter.grad], norm_type, error_if_nonfinite=True)
                assert_close(full_value(parameter.grad), before, rtol=0, atol=0, equal_nan=True)
                norm = clip_grad_norm_([parameter], 1.0, norm_type).item()
                assert isnan(norm) if isnan(bad) else norm == inf
                reference = make_parameters([full], [None])
                nn.utils.clip_grad_norm_(reference, 1.0, norm_type)
                assert_close(full_value(parameter.grad), reference[0].grad, equal_nan=True)
    assert messages[0] == (
        "the total norm of order 2.0 of the gradients is nan, so they cannot be clipped. "
        "composable_fsdp.find_nonfinite(model), called on all ranks, names the parameters at fault. Skip this step "
        "(zero_grad, no optimizer step), lower the learning rate or the loss scale, or pass "
        "error_if_nonfinite=False to scale by it anyway."
    )


@on_ranks(4)
def test_one_collective_per_mesh_axis_however_many_tensors() -> None:
    """Count all-reduces per call: for one axis, one axis in two meshes, two axes, and no axis."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    fulls = make_values(*[(4, 2)] * 6)
    again = init_device_mesh("cpu", (2, 2))
    flat, both = (grid["dp"], (Shard(0),)), (grid, (Shard(0), Shard(1)))
    mixtures: list[list[Where]] = [
        [flat] * 6,
        [flat, (again, (Shard(1), Replicate()))] * 3,
        [flat, both, flat, both, None, (grid["tp"], (Shard(1),))],
        [None] * 6,
    ]
    counts = []
    for places in mixtures:
        parameters = make_parameters(fulls, places)
        with patch("torch.distributed.all_reduce", wraps=dist.all_reduce) as all_reduce:
            clip_grad_norm_(parameters, 1.0)
        counts.append(all_reduce.call_count)
    assert counts == [1, 1, 2, 0]


@pytest.mark.behaviour("C-11")
@on_ranks(2)
def test_a_model_that_shows_unsharded_parameters_is_clipped() -> None:
    task = TASKS["mlp"]
    model = shard_layers(task.build(), fully_shard)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_backward(False, recurse=False)
    task.loss(model, task.batch_of(0, dist.get_rank())).backward()
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    norm = clip_grad_norm_(model, 1e-3)
    assert norm > 1e-3
    assert_close(clip_grad_norm_(model, 1.0), torch.tensor(1e-3))


def clip_on_foreign_mesh() -> str | None:
    lower = DeviceMesh("cpu", torch.tensor([0]))
    gradient = DTensor.from_local(torch.ones(2), lower, [Replicate()], run_check=False)
    if dist.get_rank() == 0:
        get_total_norm([gradient])
        return None
    with pytest.raises(MeshError) as error:
        get_total_norm([gradient])
    return str(error.value)


def test_a_gradient_on_another_mesh_is_an_error() -> None:
    _, message = run_ranks(clip_on_foreign_mesh, 2)
    assert message is not None
    assert "on the mesh [0], which rank 1 is not in" in message


@pytest.mark.parametrize("norm_type", [0.0, -1.0, -inf, nan])
def test_invalid_norm_orders_are_errors(norm_type: float) -> None:
    with pytest.raises(ValueError, match="must be positive or inf"):
        get_total_norm([torch.ones(2)], norm_type)


@pytest.mark.behaviour("C-11")
@on_ranks(2, 4)
def test_every_rank_skips_the_step_in_which_one_had_an_infinite_gradient() -> None:
    """Make one rank's loss infinite at step 2 for one layer's gradient only: every rank must skip that step."""
    task, rank, world_size = TASKS["mlp"], dist.get_rank(), dist.get_world_size()

    def run(model: nn.Module, ranks: list[int]) -> tuple[Run, list[float]]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        result, scales = Run(), []
        for step in range(6):
            optimizer.zero_grad()
            for r in ranks:
                loss = task.loss(model, task.batch_of(step, r))
                if rank in ranks and r == rank:
                    result.losses.append(loss.detach())
                if step == 2 and r == 1:
                    # Only the last rank holds these rows of the root's own parameter.
                    loss = loss + model.get_parameter("scale")[-1] * inf
                scaler.scale(loss / len(ranks)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        result.parameters = {name: copy_on_cpu(p) for name, p in model.named_parameters()}
        return result, scales

    expected, expected_scales = run(task.build(), list(range(world_size)))
    ours, scales = run(shard_layers(task.build(), fully_shard), [rank])
    assert expected_scales == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0, 2048.0]
    assert scales == expected_scales
    assert_equal_runs(ours, expected)
