"""Test gradient hooks on sharded parameters, optimizer steps in backward, and gradient dtypes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from composable_fsdp import MixedPrecisionPolicy, fully_shard, no_sync, policies
from composable_fsdp.trace import Operation, Recorder
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.training import OPTIMIZERS, Play, assert_equal_runs, check_parity, local_shard, play_task, train

BF16 = torch.bfloat16


def register(model: nn.Module, kind: str, hook: Callable[[Any], Any]) -> None:
    for parameter in model.parameters():
        if kind == "gradient":
            parameter.register_hook(hook)
        else:
            parameter.register_post_accumulate_grad_hook(hook)


def replace_gradients_by_hooks() -> None:
    """Check that hooks get each averaged gradient once per backward, as a DTensor, and can replace it."""
    task, rank, world_size = TASKS["mlp"], dist.get_rank(), dist.get_world_size()
    model, seen = shard_layers(task.build(), fully_shard), Counter[str]()

    def look(gradient: torch.Tensor) -> None:
        assert isinstance(gradient, DTensor)
        assert torch._C._is_torch_function_enabled(), "__torch_function__ must be enabled in hooks"
        seen["looked"] += 1

    def triple(gradient: torch.Tensor) -> torch.Tensor:
        seen["tripled"] += 1
        return gradient * 3

    register(model, "gradient", look)
    register(model, "gradient", triple)
    ours = train(model, play_task("mlp"), ranks=[rank], watched=rank, steps=3)
    assert seen == {"looked": 3 * 7, "tripled": 3 * 7}

    def scaled(model: Any, step: int) -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(3)

    expected = train(
        task.build(),
        play_task("mlp"),
        ranks=range(world_size),
        watched=rank,
        divide=world_size,
        steps=3,
        between=scaled,
    )
    assert_equal_runs(ours, expected)


def remove_hooks_and_accumulate() -> None:
    task, rank = TASKS["mlp"], dist.get_rank()
    model = shard_layers(task.build(), fully_shard)
    parameter, seen = model.get_parameter("layers.1.weight"), []

    def after(p: torch.Tensor) -> None:
        assert p is parameter
        assert torch._C._is_torch_function_enabled(), "__torch_function__ must be enabled in hooks"
        seen.append(p.grad.to_local().clone())

    handle = parameter.register_post_accumulate_grad_hook(after)
    with no_sync(model):
        task.loss(model, task.batch_of(0, rank)).backward()
    assert not seen, "the hook must not run without synchronization"
    task.loss(model, task.batch_of(1, rank)).backward()
    task.loss(model, task.batch_of(1, rank)).backward()
    assert len(seen) == 2
    torch.testing.assert_close(seen[1], parameter.grad.to_local(), rtol=0, atol=0)
    assert not torch.equal(seen[0], seen[1])
    handle.remove()
    task.loss(model, task.batch_of(2, rank)).backward()
    assert len(seen) == 2


@pytest.mark.behaviour("C-12")
def test_hooks_on_sharded_parameters_see_and_replace_their_gradients() -> None:
    run_ranks(replace_gradients_by_hooks, 2)
    run_ranks(remove_hooks_and_accumulate, 2)


class InBackward:
    """Has one optimizer per parameter, which steps and frees the gradient as soon as the gradient is ready."""

    def __init__(self, parameters: Any) -> None:
        self._parameters = list(parameters)
        self._optimizers = {p: OPTIMIZERS["adamw-foreach"]([p]) for p in self._parameters}
        self._handles = []
        if isinstance(self._parameters[0], DTensor):  # a reference has to sum all ranks' gradients first
            self._handles = [p.register_post_accumulate_grad_hook(self.step_one) for p in self._parameters]

    def step_one(self, parameter: nn.Parameter) -> None:
        self._optimizers[parameter].step()
        parameter.grad = None

    def step(self) -> None:
        if self._handles:
            assert all(p.grad is None for p in self._parameters), "every parameter must have been updated in backward"
            return
        for parameter in self._parameters:
            self.step_one(parameter)

    def zero_grad(self) -> None:
        pass


@pytest.mark.behaviour("C-12")
@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
@on_ranks("mesh_shape")
def test_optimizers_that_step_inside_backward_keep_parity(mesh_shape: tuple[int, ...]) -> None:
    for task, reshard in (("tied", True), ("mlp", False), ("mlp", None)):
        check_parity(
            TASKS[task].build,
            play_task(task),
            InBackward,
            what=task,
            mesh=init_device_mesh("cpu", mesh_shape),
            reshard_after_forward=reshard,
        )


def bf16_mlp(grad_dtype: torch.dtype | None) -> nn.Module:
    model = TASKS["mlp"].build().to(BF16)
    for parameter in model.parameters():
        parameter.grad_dtype = grad_dtype
    return model


def play_bf16(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    task = TASKS["mlp"]
    x, target = task.batch_of(step, rank)
    loss = task.loss(model, (x.to(BF16), target))
    loss.backward()
    return loss.detach()


@pytest.mark.behaviour("D-01")
@on_ranks(2)
def test_the_dtype_set_for_gradients_is_kept() -> None:
    """Check bf16 parameters with fp32 gradients, set by ``grad_dtype``. Two ranks have only one order of summation."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sums: dict[str, torch.Tensor] = {}
    for r in range(world_size):
        plain = TASKS["mlp"].build().to(BF16)
        play_bf16(plain, 0, r)
        for name, p in plain.named_parameters():
            sums[name] = sums.get(name, 0) + p.grad.float()
    for grad_dtype, reduce_dtype, expected in (
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, None, torch.float32),
        (None, torch.float32, torch.float32),
        (None, None, BF16),
        (BF16, torch.float32, BF16),
    ):
        what = f"grad_dtype {grad_dtype}, reduce_dtype {reduce_dtype}"
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        model = shard_layers(bf16_mlp(grad_dtype), fully_shard, mp_policy=policy)
        for accumulated in (1, 2):
            play_bf16(model, 0, rank)
            for name, p in model.named_parameters():
                gradient = p.grad
                assert isinstance(gradient, DTensor), f"{what}: {name}"
                assert (gradient.dtype, gradient.to_local().dtype) == (expected, expected), f"{what}: {name}"
                assert (p.dtype, p.grad_dtype) == (BF16, grad_dtype)
                wanted = local_shard(sums[name] / world_size, gradient)
                tolerance = {"rtol": 0, "atol": 0} if reduce_dtype else {"rtol": 0.02, "atol": 1e-3}
                torch.testing.assert_close(
                    gradient.to_local(), (wanted.to(expected) * accumulated), **tolerance, msg=f"{what}: {name}"
                )
        model.zero_grad()
        model.to(torch.float64)  # the model remains usable with every grad_dtype
        model.to(BF16)
        play_bf16(model, 0, rank)


class _WideGradient(torch.autograd.Function):
    """A product of matrices in bf16 whose gradient for the weight is in fp32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.float().T @ x.float()


class Wide(nn.Module):
    def __init__(self, dtype: torch.dtype, *, takes_any: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((5, 3), 0.125, dtype=dtype))
        if takes_any:
            self.weight.grad_dtype = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, _WideGradient.apply(x, self.weight))


def wide_input(rank: int, microbatch: int) -> torch.Tensor:
    """Return an input whose gradients for the weight are rounded in bf16."""
    return torch.full((2 + microbatch, 3), 1.0078125 * (rank + 1), dtype=BF16, requires_grad=True)


def wide_gradient(rank: int, microbatch: int) -> torch.Tensor:
    x = wide_input(rank, microbatch).detach().float()
    return torch.full((x.size(0), 5), 1.0078125).T @ x


def play_wide(model: nn.Module, microbatch: int, schedule: str) -> None:
    x = wide_input(dist.get_rank(), microbatch)
    output = checkpoint(model, x, use_reentrant=False) if schedule == "checkpoint" else model(x)
    output.backward(torch.full_like(output, 1.0078125))


def keep_wide_gradients() -> None:
    """Check that fp32 gradients of bf16 computation are kept, if the policy or the parameter allows them."""
    assert not torch.equal(wide_gradient(0, 0), wide_gradient(0, 0).bfloat16().float())
    for dtype, grad_dtype, schedule, mesh_shape in itertools.product(
        (BF16, torch.float32), (torch.float32, None), ("each", "no_sync", "checkpoint"), ((2,), (2, 1))
    ):
        what = f"{dtype}, {grad_dtype}, {schedule}, {mesh_shape}"
        mesh = init_device_mesh("cpu", mesh_shape)
        policy = MixedPrecisionPolicy(BF16, grad_dtype=grad_dtype)
        model: Any = fully_shard(Wide(dtype, takes_any=grad_dtype is None), mesh=mesh, mp_policy=policy)
        model.set_gradient_divide_factor(1.0)
        for _ in range(2):
            model.zero_grad()
            model.set_requires_gradient_sync(schedule != "no_sync")
            play_wide(model, 0, schedule)
            assert model.weight.grad_dtype == grad_dtype, what
            model.set_requires_gradient_sync(True)
            play_wide(model, 1, schedule)
            gradient = model.weight.grad
            expected = sum(wide_gradient(rank, microbatch) for rank in range(2) for microbatch in range(2))
            assert (model.weight.dtype, gradient.dtype, gradient.to_local().dtype) == (
                dtype,
                torch.float32,
                torch.float32,
            ), what
            assert torch.equal(gradient.full_tensor(), torch.as_tensor(expected)), what
    narrow: Any = fully_shard(Wide(BF16), mp_policy=MixedPrecisionPolicy(BF16, BF16, grad_dtype=torch.float32))
    narrow.set_gradient_divide_factor(1.0)
    play_wide(narrow, 0, "each")
    rounded = wide_gradient(0, 0).bfloat16() + wide_gradient(1, 0).bfloat16()
    assert torch.equal(narrow.weight.grad.full_tensor(), rounded.float())


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Wide(BF16, takes_any=True), Wide(BF16, takes_any=True)

    def forward(self, x: torch.Tensor, names: tuple[str, ...]) -> torch.Tensor:
        total = x.sum(1, keepdim=True)
        for name in names:
            total = total + self.get_submodule(name)(x)
        return total


def use_wide_gradients_on_one_rank() -> None:
    """Check gradients of any dtype that only rank 0 has: of one parameter of the bucket, and of all."""
    for own in (("first",), ()):
        model: Any = fully_shard(Chosen())
        model.set_reduce_scatter_unused_params(not own)
        model.set_gradient_divide_factor(1.0)
        output = model(wide_input(dist.get_rank(), 0), own if dist.get_rank() else ("first", "second"))
        output.backward(torch.full_like(output, 1.0078125))
        assert model.second.weight.grad.dtype == torch.float32
        assert torch.equal(model.second.weight.grad.full_tensor(), wide_gradient(0, 0))


@pytest.mark.behaviour("D-01")
def test_wide_gradients_are_kept_if_the_policy_or_the_parameter_allows_them() -> None:
    run_ranks(keep_wide_gradients, 2)
    run_ranks(use_wide_gradients_on_one_rank, 2)


class TwoDtypes(nn.Module):
    def __init__(self, narrow: int = 999, wide: int = 999, last: int = 1) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.zeros(narrow, dtype=BF16))
        self.wide = nn.Parameter(torch.zeros(wide))
        self.last = nn.Parameter(torch.zeros(last, dtype=BF16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            (self.narrow * x.to(BF16)).float().sum()
            + (self.wide * x).sum()
            + (self.last * x[:1].to(BF16)).float().sum()
        )


def reduce_two_dtypes() -> None:
    inputs = [torch.randn(999, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    model: Any = fully_shard(TwoDtypes())
    model(inputs[dist.get_rank()]).backward()
    means = {name: sum(x[: p.numel()].to(p.dtype).float() for x in inputs) / 2 for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        assert torch.equal(p.grad.full_tensor(), torch.as_tensor(means[name]).to(p.dtype)), name


def promote_two_dtypes() -> None:
    """Check that with torch from 2.15 on, bf16 gradients are summed in fp32 beside fp32 ones, and not without them."""
    x = torch.randn(999, generator=torch.Generator().manual_seed(dist.get_rank()))

    def narrow_gradient(is_new: bool, reduce_dtype: torch.dtype | None, *, frozen: bool = False) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(policies, "_REDUCES_IN_GRADIENT_DTYPE", is_new)
            model: Any = fully_shard(TwoDtypes(), mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
            model.set_gradient_divide_factor(
                3.0
            )  # a sum that is rounded before the division differs from one that is not
            model(x).backward()
            if frozen:
                model.zero_grad()
                model.wide.requires_grad_(False)
                model(x).backward()
            assert model.narrow.grad.dtype == BF16
            gradient: torch.Tensor = model.narrow.grad.full_tensor()
            return gradient

    promoted, alone = narrow_gradient(True, torch.float32), narrow_gradient(True, BF16)
    assert not torch.equal(promoted, alone)
    assert torch.equal(narrow_gradient(True, None), promoted)
    assert torch.equal(narrow_gradient(True, None, frozen=True), alone)
    assert torch.equal(narrow_gradient(False, None), alone)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policies, "_REDUCES_IN_GRADIENT_DTYPE", True)
        large: Any = fully_shard(TwoDtypes(600_000, 300_000, 1_500_000))
        for is_trainable in (True, False, True):  # the bf16 parameters are in one bucket only if nothing is promoted
            large.wide.requires_grad_(is_trainable)
            large.zero_grad()
            large(torch.ones(1) + dist.get_rank()).backward()
            for parameter in filter(lambda p: p.requires_grad, large.parameters()):
                assert bool((parameter.grad.to_local() == 1.5).all())


@pytest.mark.behaviour("D-01")
def test_gradients_of_several_dtypes_in_one_group_are_reduced_each_in_its_own_or_promoted() -> None:
    run_ranks(reduce_two_dtypes, 2)
    run_ranks(promote_two_dtypes, 2)


@pytest.mark.behaviour("C-12", "C-08")
@on_ranks(2)
def test_a_step_inside_backward_makes_kept_parameters_stale() -> None:
    task, rank = TASKS["mlp"], dist.get_rank()
    model = shard_layers(task.build(), fully_shard, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    InBackward(model.parameters())
    play: Play = play_task("mlp")
    play(model, 0, rank)
    with Recorder() as recorder:
        play(model, 1, rank)
    gathered = {e.group for e in recorder if e.operation is Operation.UNSHARD}
    assert gathered == {"root", "layers.0", "layers.1", "layers.2"}
