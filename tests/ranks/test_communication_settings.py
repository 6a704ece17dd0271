"""Division factors, all-reduce hooks, custom collectives, process groups and streams of gradients."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import composable_fsdp as ours
from composable_fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from composable_fsdp.errors import ConfigurationError
from composable_fsdp.trace import Operation, Recorder
from tests._internals import find_state, is_over_group, state_of
from tests.helpers.assert_trace import assert_trace
from tests.helpers.counted_collectives import counted_collectives
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.sharding import sharded
from tests.helpers.training import check_parity, local_shard, play_task
from tests.helpers.transports import SOCKETS


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def summed_gradients(task_name: str) -> dict[str, torch.Tensor]:
    task = TASKS[task_name]
    model = task.build()
    for rank in range(dist.get_world_size()):
        task.loss(model, task.batch_of(0, rank)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients(model: nn.Module, sums: dict[str, torch.Tensor], divisor: float, what: str, **tol: Any) -> None:
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert isinstance(gradient, DTensor), f"{what}: {name}"
        expected = local_shard(sums[name] / divisor, gradient)
        torch.testing.assert_close(gradient.to_local(), expected, **tol, msg=_message(f"{what}, {name}"))


def _message(what: str) -> Callable[[str], str]:
    return lambda text: f"{what}: {text}"


@pytest.mark.behaviour("C-09", "D-01")
@pytest.mark.parametrize("mesh_shape", [(1,), (2, 2)])
@on_ranks("mesh_shape")
def test_gradients_are_divided_once_by_the_factor_in_every_dtype(mesh_shape: tuple[int, ...]) -> None:
    task, rank, world_size = TASKS["mlp"], dist.get_rank(), dist.get_world_size()
    sums = summed_gradients("mlp")
    for factor in (None, 1.0, 3.0, float(world_size), 16):
        for sum_only in (False, True):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                what = f"factor {factor}, sum only: {sum_only}, {dtype}"
                policy = MixedPrecisionPolicy(reduce_dtype=dtype)
                model = shard_layers(task.build(), fully_shard, mesh=mesh_of(mesh_shape), mp_policy=policy)
                for module in sharded_modules(model):
                    if factor is not None:
                        module.set_gradient_divide_factor(factor)
                    module.set_force_sum_reduction_for_comms(sum_only)
                task.loss(model, task.batch_of(0, rank)).backward()
                tolerance = {} if dtype is torch.float32 else {"rtol": 3e-2, "atol": 1e-3}
                assert_gradients(model, sums, factor or world_size, what, **tolerance)
    model = fully_shard(task.build())
    for bad in (0, -1.0):
        with pytest.raises(ConfigurationError, match="must be positive"):
            model.set_gradient_divide_factor(bad)


@pytest.mark.behaviour("D-01")
@on_ranks(4)
def test_a_reduction_in_fp16_neither_overflows_nor_vanishes() -> None:
    """Reduce four gradients of 20000, whose sum overflows fp16 and whose mean does not; tiny ones are kept too."""
    model: Any = nn.Linear(4, 4, bias=False)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    for value in (20000.0, 6e-7):
        model.zero_grad()
        (model(torch.ones(1, 4)).sum() * value).backward()
        gradient = model.weight.grad
        torch.testing.assert_close(gradient.to_local(), torch.full((1, 4), value), rtol=0.1, atol=0)


def hook_into_the_reduction(mesh_shape: tuple[int, ...]) -> None:
    """Check that the hook is called once per group and backward with the summed shards, which it may change."""
    task, rank, world_size = TASKS["mlp"], dist.get_rank(), dist.get_world_size()
    sums = summed_gradients("mlp")
    for dtype in (torch.float32, torch.bfloat16):
        model = shard_layers(
            task.build(), fully_shard, mesh=mesh_of(mesh_shape), mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype)
        )
        calls: Counter[str] = Counter()

        def hook(output: torch.Tensor, dtype: torch.dtype = dtype, calls: Counter[str] = calls) -> None:
            assert (output.ndim, output.dtype) == (1, dtype)
            assert not torch.is_grad_enabled()
            calls["hook"] += 1
            output.mul_(4)

        modules = sharded_modules(model)
        for module in modules[1:]:
            module.set_all_reduce_hook(hook)
        task.loss(model, task.batch_of(0, rank)).backward()
        assert calls["hook"] == len(modules) - 1
        hooked = {name: value * (1 if name == "scale" else 4) for name, value in sums.items()}
        tolerance = {} if dtype is torch.float32 else {"rtol": 3e-2, "atol": 1e-3}
        assert_gradients(model, hooked, world_size, "hook", **tolerance)


@pytest.mark.behaviour("C-09")
def test_the_all_reduce_hook_changes_the_gradient() -> None:
    run_ranks(hook_into_the_reduction, 2, (2,))
    run_ranks(hook_into_the_reduction, 4, (2, 2))


class Noted:
    """A collective of torch that records its calls. Its memory does not begin at the start of its storage."""

    def __init__(self, collective: Callable[..., Any]) -> None:
        self.notes: list[object] = []
        self._collective = collective

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.notes.append("allocate")
        return torch.full((8 + torch.Size(size).numel(),), float("nan"), dtype=dtype, device=device)[8:]

    def __call__(self, **options: Any) -> Any:
        self.notes.append({name: value for name, value in options.items() if name == "async_op"})
        return self._collective(**options)


def gather_by_torch(*, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **options: Any) -> Any:
    return dist.all_gather(list(output_tensor.chunk(dist.get_world_size(options["group"]))), input_tensor, **options)


def scatter_by_torch(*, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **options: Any) -> Any:
    return dist.reduce_scatter(
        output_tensor, list(input_tensor.chunk(dist.get_world_size(options["group"]))), **options
    )


def asynchronous(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``collective`` with a work as its result, for which the library must wait."""
    return lambda **options: collective(**options | {"async_op": True})


def move_bytes_by_hand(mesh_shape: tuple[int, ...]) -> None:
    for is_asynchronous, task, reshard in ((True, "wide", True), (False, "mlp", None), (False, "mlp", False)):
        pair = gather_by_torch, scatter_by_torch
        gather, scatter = map(Noted, map(asynchronous, pair) if is_asynchronous else pair)

        def shard(model: nn.Module, gather=gather, scatter=scatter, reshard=reshard) -> None:
            shard_layers(model, fully_shard, mesh=mesh_of(mesh_shape), reshard_after_forward=reshard)
            for module in sharded_modules(model):
                module.set_custom_all_gather(gather)
                module.set_custom_reduce_scatter(scatter)

        with counted_collectives() as counts:
            model = check_parity(TASKS[task].build, play_task(task), shard=shard, what=task, steps=2)
        allocated = [each.notes.count("allocate") for each in (gather, scatter)]
        launched = [len(each.notes) - each.notes.count("allocate") for each in (gather, scatter)]
        if state_of(model).group.process_groups[0].axes.shard.size > 1:
            assert counts["all_gather"] == counts["reduce_scatter"] == 0
            assert {"async_op": True} not in gather.notes + scatter.notes
            assert launched[0] == allocated[0] > 0, "each all-gather allocates one message"
            assert 2 * launched[1] == allocated[1] > 0, "each reduce-scatter allocates its input and its output"
        else:  # an axis of one rank has no messages
            assert launched == allocated == [0, 0]


def refuse_what_is_no_collective() -> None:
    model: Any = fully_shard(nn.Linear(4, 4))
    for bad in (print, object(), None):
        with pytest.raises(ConfigurationError, match="set_custom_all_gather takes an object with allocate"):
            model.set_custom_all_gather(bad)
        with pytest.raises(ConfigurationError, match="set_custom_reduce_scatter takes an object with allocate"):
            model.set_custom_reduce_scatter(bad)


@pytest.mark.behaviour("C-09")
@pytest.mark.parametrize("mesh_shape", [(1,), (2, 2)])
def test_custom_collectives_get_one_message_per_group(mesh_shape: tuple[int, ...]) -> None:
    run_ranks(move_bytes_by_hand, torch.Size(mesh_shape).numel(), mesh_shape, environment=SOCKETS)
    if mesh_shape == (1,):
        run_ranks(refuse_what_is_no_collective, 1)


def group_of(communicator: object) -> dist.ProcessGroup:
    assert is_over_group(communicator)
    return communicator.group


def separate_and_pool() -> None:
    def shard(model: nn.Module) -> None:
        shard_layers(model, fully_shard, mesh=mesh_of((2, 2)))
        root, first, *others = sharded_modules(model)
        root.set_separate_reduce_scatter_group()
        process_groups = [state_of(m).group.process_groups[0] for m in model.modules() if find_state(m) is not None]
        for pgs in process_groups:
            gather, scatter = group_of(pgs.gather), group_of(pgs.scatter)
            assert gather is not scatter
            assert dist.get_process_group_ranks(gather) == dist.get_process_group_ranks(scatter)
        separate = {id(group_of(pgs.scatter)) for pgs in process_groups}
        assert len(separate) == 1, "all groups share one additional process group"
        root.set_separate_reduce_scatter_group()  # a second call has no effect
        assert {id(group_of(pgs.scatter)) for pgs in process_groups} == separate
        first.set_separate_reduce_scatter_group(False)
        assert process_groups[1].scatter is process_groups[1].gather
        for module in others:
            module.set_allocate_memory_from_process_group_for_comm(True)
        others[0].set_allocate_memory_from_process_group_for_comm(False)

    check_parity(TASKS["transformer"].build, play_task("transformer"), shard=shard, steps=3)


def trace_reductions_in_flight() -> None:
    task, rank = TASKS["chain"], dist.get_rank()
    model = shard_layers(task.build(), fully_shard, fuses=False)

    def most_in_flight() -> int:
        with Recorder() as recorder:
            task.loss(model, task.batch_of(0, rank)).backward()
        in_flight, most = 0, 0
        for event in recorder:
            in_flight += (event.operation is Operation.REDUCE) - (event.operation is Operation.REDUCED)
            most = max(most, in_flight)
        assert in_flight == 0
        return most

    assert most_in_flight() == 1  # the second is launched once the first has been waited for
    for limit in (1, 3, 1, 8):
        model.set_reduce_scatter_max_input_buffers(limit)
        assert most_in_flight() == min(limit, 4), limit
    model.set_reduce_scatter_max_input_buffers(1)
    sharded_modules(model)[2].set_reduce_scatter_max_input_buffers(2, recurse=False)
    assert most_in_flight() == 2, "the largest count applies to all groups"
    model.set_reduce_scatter_max_input_buffers(2)
    with Recorder() as recorder:
        task.loss(model, task.batch_of(0, rank)).backward()
    order = ["3", "2", "3 ", "1", "2 ", "0", "1 ", "0 "]
    assert_trace(recorder, *(f"reduce{'d' if k.endswith(' ') else ''} layers.{k.strip()}" for k in order))
    for bad in (0, True, 1.5, None):
        with pytest.raises(ConfigurationError, match="int of at least 1"):
            model.set_reduce_scatter_max_input_buffers(bad)


class Event:
    """An event of a device with null streams, which is never queried."""


def train_after_an_event() -> None:
    task = TASKS["mlp"]

    def play(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        if isinstance(model, FSDPModule):
            model.set_post_optim_event(Event())
        return play_task("mlp")(model, step, rank)

    check_parity(task.build, play, steps=3)


@pytest.mark.behaviour("C-09")
def test_process_groups_memory_pools_events_and_reductions_in_flight_can_be_set() -> None:
    run_ranks(trace_reductions_in_flight, 2, environment=SOCKETS)
    run_ranks(train_after_an_event, 2)
    run_ranks(separate_and_pool, 4)


def use_own_collectives(library: Any) -> tuple[list[object], list[object], Any]:
    """Run a step, two explicit unshards, and a step after ``_set_unshard_async_op(True)``."""
    torch.manual_seed(0)
    model = library.fully_shard(nn.Linear(3, 3), reshard_after_forward=True)
    gather, scatter = Noted(gather_by_torch), Noted(scatter_by_torch)
    model.set_custom_all_gather(gather)
    model.set_custom_reduce_scatter(scatter)
    inputs = torch.ones(2, 3) + dist.get_rank()
    model(inputs).sum().backward()
    for asynchronous in (True, False):
        handle = model.unshard(async_op=asynchronous)
        if handle is not None:
            handle.wait()
        model.reshard()
    model._set_unshard_async_op(True)
    model(inputs).sum().backward()
    return gather.notes, scatter.notes, model


@pytest.mark.behaviour("C-09", "I-01")
@on_ranks(2)
def test_custom_collectives_allocate_and_wait_like_those_of_torch() -> None:
    gathers, scatters, model = use_own_collectives(ours)
    of_torch = use_own_collectives(torch_fsdp)
    assert (gathers, scatters) == of_torch[:2]
    waits, returns = ["allocate", {"async_op": False}], ["allocate", {"async_op": True}]
    assert gathers == [*waits, *waits, *returns, *waits, *returns, *returns]
    assert scatters == ["allocate", "allocate", {}] * 2
    linear = nn.Linear(3, 3)
    (linear(torch.ones(2, 3)).sum() + linear(2 * torch.ones(2, 3)).sum()).backward()
    for name, parameter in linear.named_parameters():
        gradient = model.get_parameter(name).grad
        assert parameter.grad is not None
        torch.testing.assert_close(gradient.to_local(), local_shard(parameter.grad, gradient))


class Uneven(nn.Module):
    """Shards of 6 and 3 elements, of 2 and 1, and of 1 and 0; the last parameter is used on the first rank only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return out * self.scale if dist.get_rank() == 0 else out


def hooked(library: Any, module: nn.Module, *, sum_only: bool, dtype: torch.dtype) -> tuple[Any, list[torch.Tensor]]:
    seen: list[torch.Tensor] = []
    model = library.fully_shard(module, mp_policy=library.MixedPrecisionPolicy(reduce_dtype=dtype))
    model.set_all_reduce_hook(lambda output: seen.append(output.clone()))
    model.set_force_sum_reduction_for_comms(sum_only)
    model(torch.ones(2, 3) + dist.get_rank()).sum().backward()
    (output,) = seen
    return output, [p.grad.to_local() for p in model.parameters() if p.grad is not None]


def see_gradients_alone() -> None:
    for sum_only, dtype in ((False, torch.float32), (True, torch.float32), (False, torch.float16)):
        torch.manual_seed(0)
        even = nn.Linear(3, 4)
        of_torch, _ = hooked(torch_fsdp, copy.deepcopy(even), sum_only=sum_only, dtype=dtype)
        of_ours, gradients = hooked(ours, even, sum_only=sum_only, dtype=dtype)
        torch.testing.assert_close(of_ours, of_torch)
        divisor = 2 if sum_only else 1
        torch.testing.assert_close(of_ours.float() / divisor, torch.cat([g.reshape(-1) for g in gradients]))
        output, gradients = hooked(ours, Uneven(), sum_only=sum_only, dtype=dtype)
        assert len(gradients) == 3
        assert output.shape == ((9,) if dist.get_rank() == 0 else (4,))
        torch.testing.assert_close(output.float() / divisor, torch.cat([g.reshape(-1) for g in gradients]))


def take_what_is_added_outside_of_the_mesh() -> None:
    """Use two meshes of one rank; a parameter that only the first uses gets the sum of both ranks on both."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outside", "shard"))
    model: Any = fully_shard(Uneven(), mesh=mesh["shard"])
    sharded(model).set_all_reduce_hook(lambda output: dist.all_reduce(output))
    model(torch.ones(2, 3)).sum().backward()
    scales = [torch.empty(1) for _ in range(2)]
    dist.all_gather(scales, model.scale.grad.to_local())
    assert scales[0] == scales[1] != 0


@pytest.mark.behaviour("C-09", "I-01")
def test_the_all_reduce_hook_gets_the_reduced_gradients_and_nothing_else() -> None:
    run_ranks(see_gradients_alone, 2)
    run_ranks(take_what_is_added_outside_of_the_mesh, 2)
