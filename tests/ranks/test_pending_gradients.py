"""Gradients that are not reduced yet: seen, changed, zeroed and reduced by the user, and backwards that he finishes."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.torch_version import TorchVersion

import composable_fsdp
from composable_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard, no_sync
from composable_fsdp.errors import LifecycleError
from tests.helpers.run_ranks import on_ranks
from tests.helpers.transports import SOCKETS
from tests.simulation import BACKEND, simulated_accelerator

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
OFFLOAD = CPUOffloadPolicy(pin_memory=False)


class Pair(nn.Module):
    def __init__(self, inputs: int = 4, outputs: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, outputs, bias=False), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x)


def pair(mesh: DeviceMesh | None = None, **options: Any) -> Any:
    """Return a pair whose layers are one group. Parameters stay unsharded, so that layers can run alone."""
    model = Pair(options.pop("inputs", 4), options.pop("outputs", 4))
    fully_shard([model.first, model.second], mesh=mesh, reshard_after_forward=False, mp_policy=BF16, **options)
    sharded: Any = fully_shard(model)
    sharded.set_reshard_after_backward(False)
    return sharded


def inputs(value: float, width: int = 4) -> torch.Tensor:
    return torch.full((1, width), value, dtype=torch.bfloat16, requires_grad=True)


def full(gradient: Any) -> torch.Tensor:
    return gradient.full_tensor()


def pending(model: Any) -> Any:
    """Return the pending gradients, and check that nothing is sent for them."""
    with CommDebugMode() as communication:
        found = model.get_pending_gradients()
    assert communication.get_total_counts() == 0
    return found


def accumulate(policy: OffloadPolicy) -> None:
    model: Any = fully_shard(nn.Linear(1, 2, bias=False), mp_policy=BF16, offload_policy=policy)
    cases = [
        ([(True, 256), (False, 1), (True, -256)], 1),
        # 256 + 1 is 256 in bf16, in which pending gradients are summed; those in ``grad`` are in fp32.
        ([(True, 3), (False, 256), (False, 1), (True, -256)], 3),
    ]
    for contributions, expected in cases:
        model.zero_grad()
        for synchronizes, value in contributions:
            model.set_requires_gradient_sync(synchronizes)
            model(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
            found = pending(model)
            assert model.weight.grad.dtype == torch.float32
            if synchronizes:
                assert found == {}
            else:
                ((parameter, (unreduced, partial)),) = found.items()
                assert parameter is model.weight
                assert partial is None
                assert (unreduced.dtype, unreduced.shape) == (torch.bfloat16, (2, 1))
                assert full(model.weight.grad).tolist() == [[contributions[0][1]]] * 2
        assert full(model.weight.grad).tolist() == [[expected]] * 2


def change(policy: OffloadPolicy, reshards: bool) -> None:
    model: Any = fully_shard(
        nn.Linear(2, 4, bias=False), reshard_after_forward=False, mp_policy=BF16, offload_policy=policy
    )
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(reshards)
    weight = model.weight  # the sharded one
    known, expected = None, torch.zeros(4, 2, dtype=torch.bfloat16)
    for step, value in enumerate((2.0, 1.0, 1.0)):
        output = model(torch.full((1, 2), value, dtype=torch.bfloat16))
        if known is not None:
            assert pending(model)[weight][0] is known
        output.sum().backward()
        expected += value
        found = pending(model)
        unreduced, partial = found[weight]
        found.clear()
        assert pending(model)[weight][0] is unreduced, "the mapping is a copy"
        assert weight.grad is partial is None
        assert known is None or unreduced is known
        known = unreduced
        if step == 0:
            unreduced.square_()[:, 0].add_(1)
            expected.square_()[:, 0].add_(1)
        elif step == 1:
            unreduced.copy_(torch.full_like(unreduced, 3))
            expected.fill_(3)
        assert torch.equal(unreduced, expected)
        model.reshard()
        assert pending(model)[weight][0] is known
    model.synchronize_gradients()
    assert pending(model) == {}
    assert torch.equal(full(weight.grad), expected.float())


def clear(policy: OffloadPolicy, set_to_none: bool, whole: bool) -> None:
    """Zero the gradients of a model, or of one of two layers of a group, between a forward and its backward."""
    model = pair(offload_policy=policy)
    first, second = model.first.weight, model.second.weight
    for synchronizes, value in ((True, 4.0), (False, 2.0)):
        model.set_requires_gradient_sync(synchronizes)
        model(inputs(value)).sum().backward()
    output = model.first(inputs(1.0))
    assert set(pending(model)) == {first, second}
    (model if whole else model.first).zero_grad(set_to_none=set_to_none)
    found = pending(model)
    for parameter in (first, second) if whole else (first,):
        if set_to_none:
            assert parameter not in found
            assert parameter.grad is None
        else:
            assert not found[parameter][0].any()
            assert found[parameter][1] is None
            assert not parameter.grad.to_local().any()
    if not whole:
        assert (found[second][0] == 2).all()
        assert (second.grad.to_local() == 4).all()
    output.sum().backward()
    model.synchronize_gradients()
    assert (full(first.grad) == 1).all()
    if set_to_none and whole:
        assert second.grad is None
    else:
        assert (full(second.grad) == (0 if whole else 6)).all()


def divide_partial_sums() -> None:
    """Change the divisor between microbatches that are reduced over the shard axis only: the last counts for all."""
    hybrid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for mesh in (None, hybrid):
            model: Any = fully_shard(
                nn.Linear(1, 2, bias=False), mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype)
            )
            weight, value = model.weight, 1.0 + dist.get_rank()  # their sum is 3
            for factors in ((16, 64, 1), (1, 2, 48), (3, 16), (2, 4)):
                for factor in factors:
                    model.set_gradient_divide_factor(factor)
                    with no_sync(model, sharded=True) if factor != factors[-1] else nullcontext():
                        model(torch.full((1, 1), value)).sum().backward()
                expected = torch.full((2, 1), 3.0 * len(factors) / factors[-1])
                torch.testing.assert_close(full(weight.grad).float(), expected, rtol=2e-3, atol=0)
                model.zero_grad()


def sum_of_split_backwards(impl: Any, reduce_dtype: torch.dtype | None, ordinary: Sequence[int] = ()) -> float:
    """Return the gradient of weights of 256 + 1 + 1 + 1, each set after the backward of its input, as pipelines do.

    The backwards with the numbers ``ordinary`` are not split.
    """
    layer = nn.Linear(4, 4, bias=False)
    policy = impl.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
    model = impl.fully_shard(layer, mp_policy=policy, reshard_after_forward=False)
    weight = model.weight
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    model.set_is_last_backward(False)
    for number, value in enumerate((256.0, 1.0, 1.0, 1.0)):
        x = inputs(value)
        output = model(x)
        if number in ordinary:
            output.backward(torch.ones_like(output))
            continue
        _, groups = stage_backward_input([output], [torch.ones_like(output)], [x], model.parameters())
        stage_backward_weight(model.parameters(), groups)
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    state = model._get_fsdp_state()
    state._fsdp_param_groups[0].post_backward()
    state._root_post_backward_final_callback()
    found = weight.grad.to_local().unique().item()
    assert isinstance(found, float)
    return found


def tensor_parallel(policy: OffloadPolicy, shards: int) -> None:
    mesh = init_device_mesh("cpu", (shards, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    reference = nn.Linear(4, 4, bias=False)
    model: Any = parallelize_module(copy.deepcopy(reference), mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False, offload_policy=policy)
    model.set_requires_gradient_sync(False)
    known = None
    for value in (1.0, 2.0):
        reference(torch.full((2, 4), value)).sum().backward()
        model(torch.full((2, 4), value)).sum().backward()
        unreduced, partial = pending(model)[model.weight]
        assert partial is None
        assert unreduced.device_mesh == mesh["tp"]
        assert unreduced.placements == (Shard(0),)
        assert pending(model)[model.weight][0] is unreduced
        assert known is None or known is unreduced
        known = unreduced
        assert torch.equal(full(unreduced), torch.as_tensor(reference.weight.grad))
    model.synchronize_gradients()
    assert pending(model) == {}
    assert torch.equal(full(model.weight.grad), torch.as_tensor(reference.weight.grad))


def hybrid(policy: OffloadPolicy, cleared: bool | None, dim: int) -> None:
    width, height = (1, 5) if dim == 0 else (4, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = pair(mesh, inputs=width, outputs=height, shard_placement_fn=lambda _: Shard(dim), offload_policy=policy)
    first, second = model.first.weight, model.second.weight
    model(inputs(4.0, width)).sum().backward()
    model.set_requires_all_reduce(False)
    for module, value in ((model.first, 2.0), (model.second, 3.0)):
        module(inputs(value, width)).sum().backward()
    model.set_requires_gradient_sync(False)
    model.first(inputs(1.0, width)).sum().backward()
    found = pending(model)
    assert set(found) == {first, second}
    assert found[first][0] is not None
    assert found[second][0] is None
    for parameter, (_, partial) in found.items():
        assert pending(model)[parameter][1] is partial
        assert not isinstance(partial, DTensor)
        assert partial.dtype == torch.bfloat16
        assert partial.shape == parameter.to_local().shape
        assert parameter.grad.dtype == torch.float32
    if cleared is not None:
        model.zero_grad(set_to_none=cleared)
        assert (pending(model) == {}) is cleared
        assert not any(part.any() for parts in pending(model).values() for part in parts if part is not None)
    expected = 7 if cleared is None else 0
    for _ in range(2):
        model.synchronize_gradients()
        assert pending(model) == {}
        for parameter in (first, second):
            assert parameter.grad is None if cleared else (full(parameter.grad) == expected).all()
    model.set_requires_all_reduce(True)
    model.set_requires_gradient_sync(True)
    model(inputs(1.0, width)).sum().backward()
    for parameter in (first, second):
        assert (full(parameter.grad) == expected + 1).all()


def clear_one_sum(set_to_none: bool) -> None:
    model = pair(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    first, second = model.first.weight, model.second.weight
    model.set_requires_all_reduce(False)
    model(inputs(2.0)).sum().backward()
    model.first.zero_grad(set_to_none=set_to_none)
    found = pending(model)
    assert found[second][1].any()
    assert first not in found if set_to_none else not found[first][1].any()
    model.synchronize_gradients()
    assert (full(second.grad) == 2).all()
    if set_to_none:
        assert first.grad is None
    else:
        assert (full(first.grad) == 0).all()


def finish(mesh: DeviceMesh | None = None) -> None:
    """Compare steps of two microbatches that are finished by hand with plain ones."""
    torch.manual_seed(0)
    reference: Any = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    models = [copy.deepcopy(reference) for _ in range(2)]
    for model in models:
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    plain, manual = models
    manual.set_manual_backward_finalization(True)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        batches = [torch.randn(4, 64, generator=generator) for _ in range(2)]
        for number, batch in enumerate(batches):
            for model in models:
                model.set_requires_gradient_sync(number == 1 or step == 1)
                model(batch).square().sum().backward()
        if step == 2:  # reduce what a step without gradient synchronization has left
            manual.set_requires_gradient_sync(True)
        handle = manual.finalize_backward(async_op=step % 2 == 0)
        assert (handle is not None) is (step % 2 == 0)
        for _ in range(2 if handle is not None else 0):
            handle.wait()
        for a, b in zip(plain.parameters(), manual.parameters(), strict=True):
            assert torch.equal(a.grad.to_local(), b.grad.to_local())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    manual(torch.ones(4, 64)).sum().backward()
    ends = [str(model.schedule()).splitlines()[-1] for model in models]
    assert ["wait" in end for end in ends] == [True, False], ends
    missing = [p.grad is None for p in manual.parameters()]
    assert any(missing), "the last reduction is in flight"
    manual.finalize_backward()
    assert not any(p.grad is None for p in manual.parameters())


def finish_as_pipelines_do() -> None:
    """Finalize microbatches that each set the mode again and leave their parameters unsharded, as torch 2.15 does."""
    torch.manual_seed(0)
    reference: Any = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))
    model = copy.deepcopy(reference)
    for layer in (model[0], model[1]):
        fully_shard(layer, reshard_after_forward=layer is model[0])
    fully_shard(model)
    shards = list(model.parameters())
    for step in range(3):
        for microbatch in range(3):
            x = torch.full((2, 5), 1.0 + step + microbatch)
            model.set_manual_backward_finalization(True)
            out = model(x)
            model.set_reshard_after_backward(False)
            model.set_requires_gradient_sync(False)
            out.square().mean().backward()
            reference(x).square().mean().backward()
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        model[1].set_reshard_after_backward(step != 1)  # finalization obeys the setting of each module
        handle = model.finalize_backward(async_op=step != 2)
        kept = [] if step != 1 else list(model[1].parameters())
        assert all(isinstance(each, DTensor) != any(each is one for one in kept) for each in model.parameters())
        model.set_manual_backward_finalization(True)  # changes nothing, so it is allowed before the wait
        if handle is not None:
            handle.wait()
        model.set_manual_backward_finalization(False)
        for parameter, expected in zip(shards, reference.parameters(), strict=True):
            torch.testing.assert_close(full(parameter.grad), expected.grad)
        model.zero_grad()
        reference.zero_grad()


def finish_before_the_first_forward(library: Any) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (*model, model):
        library.fully_shard(module)
    for is_manual in (None, True, False):
        if is_manual is not None:
            model.set_manual_backward_finalization(is_manual)
        for module in (model, model[1]):
            assert module.finalize_backward() is None
            handle = module.finalize_backward(async_op=True)
            assert isinstance(handle, library.GradientReductionHandle)
            handle.wait()
            handle.wait()
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"set_manual_backward_finalization\(True\)"):
        model.finalize_backward()


def finish_without_synchronization() -> None:
    model: Any = fully_shard(nn.Linear(4, 4))
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 4)).sum().backward()
    model.finalize_backward()
    assert set(pending(model)) == set(model.parameters())
    assert model.weight.grad is None
    model.set_requires_gradient_sync(True)
    model.finalize_backward()
    assert pending(model) == {}
    assert (full(model.weight.grad) == 1).all()


def finish_after_a_failed_forward(fails: Callable[[Any], object], is_waited: bool) -> None:
    """Let a forward fail before a finalization, or between its launch and its wait: the gradients are not lost."""
    model: Any = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4)))
    model.set_manual_backward_finalization(True)
    model(torch.ones(1, 4)).sum().backward()
    handle = model.finalize_backward(async_op=True) if is_waited else None
    with pytest.raises((RuntimeError, TypeError)):
        fails(model)
    with pytest.raises(LifecycleError, match="between a backward and the end of its finalization"):
        model.set_manual_backward_finalization(False)
    if handle is None:
        handle = model.finalize_backward(async_op=True)
    handle.wait()
    assert torch.equal(full(model[1].weight.grad), full(model[1].bias.grad)[:, None] * model[0](torch.ones(4)))
    model.set_manual_backward_finalization(False)
    model(torch.ones(1, 4)).sum().backward()
    assert (full(model[1].bias.grad) == 2).all()


def synchronize_a_part() -> None:
    model: Any = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4, bias=False)), nn.Linear(4, 4, bias=False)))
    with no_sync(model):
        model(torch.ones(1, 4)).sum().backward()
    assert set(model.get_pending_gradients(recurse=False)) == {model[1].weight}
    model.synchronize_gradients(recurse=False)
    assert set(pending(model)) == {model[0].weight}
    assert model[0].weight.grad is None
    assert model[1].weight.grad is not None


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(LifecycleError) as caught:
        call()
    return str(caught.value)


@on_ranks(2)
def test_a_finalization_at_the_wrong_time_is_an_error() -> None:
    model: Any = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4)))
    model(torch.ones(1, 4)).sum().backward()
    itself = "after a backward that has finalized itself. Call set_manual_backward_finalization(True)"
    assert itself in refused(model.finalize_backward)
    model.set_manual_backward_finalization(True)
    model(torch.ones(1, 4)).sum().backward()
    assert refused(model[0].finalize_backward) == ("finalize_backward() was called on '0'. Call it on the root module.")
    between = "between a backward and the end of its finalization. Call finalize_backward() first"
    assert between in refused(lambda: model.set_manual_backward_finalization(False))
    handle = model.finalize_backward(async_op=True)
    assert refused(model.finalize_backward) == (
        "finalize_backward() was called again. Call wait() of its last handle first."
    )
    model.reset_iter_state()
    assert (
        refused(handle.wait) == "wait() was called after reset_iter_state() has dropped the reductions of the handle."
    )
    model.set_manual_backward_finalization(False)


@pytest.mark.parametrize("name", ["synchronize_gradients", "finalize_backward"])
@on_ranks(2)
def test_a_pass_that_runs_cannot_be_finished(name: str) -> None:
    model: Any = fully_shard(nn.Sequential(nn.Linear(4, 4)))
    model.set_manual_backward_finalization(True)
    model[0].register_forward_pre_hook(lambda *_: getattr(model, name)())
    text = f"{name}() was called in the forward of root, which may still give gradients"
    assert text in refused(lambda: model(torch.ones(1, 4)))


@on_ranks(2)
def test_a_conversion_does_not_lose_pending_gradients() -> None:
    model: Any = fully_shard(nn.Linear(4, 4))
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 4)).sum().backward()
    text = "holds gradients that were accumulated and not delivered yet, which this change would lose"
    assert text in refused(lambda: model.to(torch.bfloat16))
    weight = model.weight
    for conversion in (model.float, model.cpu, lambda: model.to("cpu", torch.float32)):
        (before, _), *_ = model.get_pending_gradients().values()
        conversion()
        (after, _), *_ = model.get_pending_gradients().values()
        assert after is before
        assert model.weight is weight
    refused(lambda: model._apply(torch.clone))  # other memory, though the same dtype
    model.synchronize_gradients()
    assert torch.equal(full(weight.grad), torch.ones(4, 4))
    model.to(torch.bfloat16)
    assert model.weight.dtype == torch.bfloat16


@on_ranks(2)
def test_a_conversion_loses_neither_a_gradient_nor_its_dtype() -> None:
    layer = nn.Linear(4, 4, dtype=torch.bfloat16)
    layer.weight.grad_dtype = torch.float32
    model: Any = fully_shard(layer)
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    gradient = model.weight.grad
    conversions: dict[torch.dtype, Any] = {
        torch.half: model.half,
        torch.float64: model.double,
        torch.float32: model.float,
        torch.bfloat16: lambda: model._apply(torch.Tensor.bfloat16),
    }
    for dtype, conversion in conversions.items():
        conversion()
        assert (model.weight.dtype, model.bias.grad.dtype) == (dtype, dtype)
        assert model.weight.grad_dtype == model.weight.grad.dtype == torch.float32
        assert torch.equal(full(model.weight.grad), torch.ones(4, 4))
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert torch.equal(full(model.weight.grad), torch.full((4, 4), 2.0))
    assert gradient.dtype == torch.float32
    # A conversion that raises, before and after it has converted the weight, leaves the gradient in its dtype.
    for fails in ("weight", "bias"):
        layer = nn.Linear(4, 4)
        layer.weight.grad_dtype = torch.float64
        model = fully_shard(layer)
        model(torch.ones(1, 4)).sum().backward()

        def convert(tensor: torch.Tensor, dims: int = 2 if fails == "weight" else 1) -> torch.Tensor:
            if tensor.ndim == dims:
                raise ValueError("this tensor stays as it is")
            return tensor.half()

        with pytest.raises(ValueError, match="this tensor stays as it is"):
            model._apply(convert)
        assert model.weight.grad_dtype == model.weight.grad.dtype == torch.float64
        assert torch.equal(full(model.weight.grad), torch.ones(4, 4, dtype=torch.float64))


class Passing(nn.Module):
    """Passes its input on beside a layer that it calls if asked to, with a frozen scale."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.is_used = nn.Linear(4, 4), False
        self.scale = nn.Parameter(torch.full((4,), 2.0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if self.is_used else x * self.scale


def pass_by(*, finalizes: bool, reshards: bool, retain: bool) -> None:
    """Go through a group whose trainable parameters no forward uses, then through the same, used. None may warn."""
    model: Any = nn.Sequential(nn.Linear(4, 4), Passing(), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, reshard_after_forward=reshards)
    fully_shard(model)
    model.set_manual_backward_finalization(finalizes)
    model.set_requires_gradient_sync(False)
    loss = torch.zeros(())
    for is_used in (False, True):
        model[1].is_used = is_used
        for _ in range(2):
            loss = model(torch.ones(1, 4)).sum()  # the last one stays
            loss.backward(retain_graph=retain)
        if finalizes:
            model.set_requires_gradient_sync(True)
            model.finalize_backward()
            model.set_requires_gradient_sync(False)
        else:
            model.synchronize_gradients()
        assert (model[1].layer.weight.grad is None) is not is_used
        assert (full(model[2].bias.grad) == 2).all()
        model.zero_grad()
        loss = torch.zeros(())


class Dropping(Passing):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.layer(x)
        return x * self.scale


def drop_a_result(*, finalizes: bool, is_last_reduced: bool) -> None:
    """Go through a group whose forward does not use what its trainable parameters gave. None may warn."""
    model: Any = nn.Sequential(nn.Linear(4, 4), Dropping(), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.set_manual_backward_finalization(finalizes)
    for is_reduced in (False, is_last_reduced):
        model.set_requires_gradient_sync(is_reduced)
        model(torch.ones(1, 4)).sum().backward()
    model.set_requires_gradient_sync(True)
    model.finalize_backward() if finalizes else model.synchronize_gradients()
    assert model[1].layer.weight.grad is None
    assert (full(model[2].bias.grad) == 2).all()


@on_ranks(2)
def test_a_group_that_lost_its_gradients_warns() -> None:
    """Ask for the gradients of an input alone, as schedules do that then find no weights."""
    model: Any = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4)), fully_shard(Passing())))
    model.set_requires_gradient_sync(False)
    x = torch.ones(1, 4, requires_grad=True)
    loss = model(x).sum()
    torch.autograd.grad(loss, x, retain_graph=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.synchronize_gradients()
    assert [str(each.message)[:45] for each in caught] == ["backward went through '0', but left no gradie"]


@pytest.mark.parametrize("has_grad", [False, True])
@pytest.mark.parametrize(("grad_dtype", "sets"), [(torch.float32, True), (None, True), (None, False)])
@on_ranks(2)
def test_a_dtype_of_gradients_survives_conversions(grad_dtype: torch.dtype | None, sets: bool, has_grad: bool) -> None:
    """Compare conversions of a sharded layer, whose ``grad_dtype`` may be set, with those of a plain one."""
    reference: Any = nn.Linear(4, 4)
    model: Any = copy.deepcopy(reference)
    for layer in (reference, model):
        if sets:
            layer.weight.grad_dtype = grad_dtype
        layer.bias.requires_grad_(False)
    fully_shard(model)
    if has_grad:
        for layer in (reference, model):
            layer.weight.grad = torch.ones_like(layer.weight)
        model.cpu()  # converts nothing
        if sets and grad_dtype is not None:
            reference.zero_grad()  # torch has no place for it in a converted parameter
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        for layer in (reference, model):
            layer.to(dtype)
        assert model.weight.grad_dtype == reference.weight.grad_dtype
        assert model.bias.grad_dtype == reference.bias.grad_dtype == dtype
        if has_grad:
            assert model.weight.grad.dtype == (torch.float32 if sets else dtype)
            assert torch.equal(full(model.weight.grad).float(), torch.ones(4, 4))
    for layer in (reference, model):
        layer.zero_grad()
        layer(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    expected = reference.weight.grad
    assert model.weight.grad.dtype == expected.dtype
    assert torch.equal(full(model.weight.grad), expected)
    copied = copy.deepcopy(model)
    copied.zero_grad()
    for layer in (reference, copied):
        layer.zero_grad()
        layer.half()
    assert copied.weight.grad_dtype == reference.weight.grad_dtype


CHANGES: dict[str, tuple[torch.dtype | None, bool]] = {
    "forward": (torch.float64, False),
    "forward of any": (None, False),
    "backward": (torch.float64, True),
    "to": (torch.float64, True),
    "load_state_dict": (torch.float64, True),
}
"""The new ``grad_dtype`` by the operation that notices it, and if a step comes before the change."""


@pytest.mark.parametrize("name", CHANGES)
@on_ranks(2)
def test_a_change_of_the_dtype_of_gradients_after_sharding_is_an_error(name: str) -> None:
    model: Any = fully_shard(nn.Linear(4, 4))
    values = model.state_dict()
    changed, after_a_step = CHANGES[name]
    if after_a_step:
        model(torch.ones(1, 4)).sum().backward()
        model.zero_grad()
    model.weight.grad_dtype = changed
    operations: dict[str, Callable[[], object]] = {
        "backward": model(torch.ones(1, 4)).sum().backward if name == "backward" else type(None),
        "to": model.bfloat16,
        "load_state_dict": lambda: model.load_state_dict(values, assign=True),
    }
    assert refused(operations.get(name, lambda: model(torch.ones(1, 4)))) == (
        f"grad_dtype of parameter 'weight' was changed after fully_shard, from torch.float32 to {changed}. Set it "
        "before fully_shard, or pass mp_policy=MixedPrecisionPolicy(grad_dtype=...)."
    )


@on_ranks(2)
def test_a_replacement_gets_the_dtype_of_gradients_of_the_parameter() -> None:
    """Assign a parameter with a ``grad_dtype`` from a state dict: the one from before ``fully_shard`` counts."""
    model: Any = fully_shard(nn.Linear(4, 4))
    values = model.state_dict()
    values["weight"] = nn.Parameter(values["weight"])
    values["weight"].grad_dtype = torch.float64
    model.load_state_dict(values, assign=True)
    assert model.weight is values["weight"]
    model(torch.ones(1, 4)).sum().backward()
    assert model.weight.grad_dtype == model.weight.grad.dtype == torch.float32


@on_ranks(2, environment=SOCKETS)
def test_explicit_reductions_have_no_races() -> None:
    mesh = DeviceMesh.from_group(dist.new_group(backend=BACKEND), "cpu")
    with simulated_accelerator() as device:
        finish(mesh)
        torch.manual_seed(0)
        model: Any = fully_shard(nn.Linear(64, 64), mesh=mesh)
        model.set_requires_gradient_sync(False)
        for _ in range(2):
            model(torch.randn(4, 64)).square().sum().backward()
            for unreduced, _ in model.get_pending_gradients().values():
                unreduced.mul_(0.5)
        model.synchronize_gradients()
        model.weight.grad.mul_(2)
    assert [str(race) for race in device.races] == []


@on_ranks(2)
def test_gradients_are_pending_until_they_are_reduced() -> None:
    for policy in (OffloadPolicy(), OFFLOAD):
        accumulate(policy)
        for flag in (False, True):
            change(policy, flag)
            for whole in (False, True):
                clear(policy, flag, whole)
        tensor_parallel(policy, 1)
    model: Any = fully_shard(nn.Linear(1, 2, bias=False))
    model.set_gradient_divide_factor(3)
    for synchronizes in (True, False):
        model.set_requires_gradient_sync(synchronizes)
        model(torch.full((1, 1), 3.0)).sum().backward()
    for expected in (2, 4, 4):
        assert full(model.weight.grad).tolist() == [[expected]] * 2
        model.synchronize_gradients()
        assert pending(model) == {}
    divide_partial_sums()
    for impl in (composable_fsdp, torch.distributed.fsdp):
        assert sum_of_split_backwards(impl, torch.float32) == 259
        assert sum_of_split_backwards(impl, torch.bfloat16) == 256
        expected = 256 if TorchVersion(torch.__version__) < "2.15" else 259
        assert sum_of_split_backwards(impl, None) == expected, "in the dtype of the computation, then of the shard"
    for ordinary in ([0], [1], [2, 3], [1, 3], [3]):
        assert sum_of_split_backwards(composable_fsdp, torch.float32, ordinary) == 259
    finish()
    finish_as_pipelines_do()
    finish_before_the_first_forward(composable_fsdp)
    if hasattr(torch.distributed.fsdp, "GradientReductionHandle"):
        finish_before_the_first_forward(torch.distributed.fsdp)
    finish_without_synchronization()
    for fails in (lambda model: model(torch.ones(1, 5)), lambda model: model[0]("no tensor")):
        for is_waited in (False, True):
            finish_after_a_failed_forward(fails, is_waited)
    synchronize_a_part()


@on_ranks(4)
def test_partly_reduced_gradients_are_pending_on_hybrid_meshes() -> None:
    for policy in (OffloadPolicy(), OFFLOAD):
        for cleared in (None, False, True):
            hybrid(policy, cleared, 0)
        tensor_parallel(policy, 2)
    hybrid(OffloadPolicy(), None, 1)
    clear_one_sum(True)
    clear_one_sum(False)
    # Finalize a step whose sums over the shard axis are in flight.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model: Any = fully_shard(nn.Linear(4, 4, bias=False), mesh=mesh)
    model.set_manual_backward_finalization(True)
    model.set_requires_all_reduce(False)
    model(torch.ones(1, 4)).sum().backward()
    model.set_requires_all_reduce(True)
    model.finalize_backward()
    assert pending(model) == {}
    assert (full(model.weight.grad) == 1).all()
    finish(mesh)


@on_ranks(2)
def test_groups_whose_parameters_or_results_are_not_used_do_not_warn() -> None:
    for finalizes, reshards, retain in itertools.product((False, True), repeat=3):
        pass_by(finalizes=finalizes, reshards=reshards, retain=retain)
    for finalizes, is_last_reduced in itertools.product((False, True), repeat=2):
        drop_a_result(finalizes=finalizes, is_last_reduced=is_last_reduced)
