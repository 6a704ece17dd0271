"""``copy.deepcopy`` of sharded modules: averaged weights, target networks, submodules."""

from __future__ import annotations

import copy
import gc
import io
from itertools import pairwise
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from composable_fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, no_sync, register_fsdp_forward_method
from composable_fsdp.errors import ConfigurationError, UnsupportedError
from composable_fsdp.policies import ReshardKind
from composable_fsdp.trace import Recorder
from tests._internals import state_of, unchecked
from tests.helpers.assert_trace import ledger
from tests.helpers.models import TASKS, Chain, seeded, shard_layers
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.training import OPTIMIZERS, Run, assert_equal_runs, play_task, train


def trained(model: nn.Module, task: str, **options: Any) -> Run:
    rank = dist.get_rank()
    return train(model, play_task(task), OPTIMIZERS["adamw-foreach"], ranks=[rank], watched=rank, steps=3, **options)


class Recurrent(nn.Module):
    """Like ``nn.LSTM``, keeps lists of its weights and intercepts their assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(8, 8, batch_first=True)])
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[0](x)[0])


class Link(nn.Linear):
    def __init__(self, owner: Link | None) -> None:
        super().__init__(4, 4)
        self.shared = None if owner is None else owner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if self.shared is None else x @ self.shared)


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.kept = [model]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


@pytest.mark.behaviour("A-18")
@pytest.mark.parametrize(("world_size", "reshard"), [(2, True), (2, None), (4, 2)])
@on_ranks("world_size")
def test_a_copy_trains_independently(reshard: bool | int | None) -> None:
    for task, build in (("tied", TASKS["tied"].build), ("mlp", TASKS["mlp"].build), ("chain", seeded(Recurrent))):
        model = shard_layers(build(), fully_shard, reshard_after_forward=reshard)
        trained(model, task)  # a copy of a model that has run already
        clone = copy.deepcopy(model)
        assert type(clone) is type(model)
        originals = {id(x) for x in (*model.modules(), *model.parameters())}
        assert not any(id(x) in originals for x in (*clone.modules(), *clone.parameters()))
        assert [name for name, _ in clone.named_parameters()] == [name for name, _ in model.named_parameters()]
        before = {name: p.to_local().clone() for name, p in model.state_dict().items()}
        with Recorder() as recorder:
            second = trained(clone, task)
        assert ledger(recorder) == {}
        for name, p in model.state_dict().items():
            torch.testing.assert_close(p.to_local(), before[name], rtol=0, atol=0)
        assert_equal_runs(second, trained(model, task), what=task, exact=dist.get_world_size() == 2)


def everything_is_kept() -> None:
    task, rank = TASKS["transformer"], dist.get_rank()
    model = task.build()
    model.register_buffer("steps", torch.tensor([3.0]))
    model.get_parameter("norm.weight").requires_grad_(False)
    model.get_parameter("head.weight").tag = "mine"
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mp_policy=policy)
    first, second = (layer for layer in model.layers if isinstance(layer, FSDPModule))
    second.set_gradient_divide_factor(5.0)
    second.set_reshard_after_backward(False)
    model.set_reduce_scatter_max_input_buffers(7)
    first.set_in_place_check("off")
    task.loss(model, task.batch_of(0, rank)).backward()
    for _ in range(2):  # a copy of a copy is complete too
        clone = copy.deepcopy(model)
        for (name, p), (_, q) in zip(model.named_parameters(), clone.named_parameters(), strict=True):
            assert p.requires_grad == q.requires_grad == (name != "norm.weight")
            assert (p.placements, p.device_mesh, p.dtype) == (q.placements, q.device_mesh, q.dtype)
            torch.testing.assert_close(p.to_local(), q.to_local(), rtol=0, atol=0)
            assert p.to_local().data_ptr() != q.to_local().data_ptr() or p.to_local().numel() == 0
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(p.grad.to_local(), q.grad.to_local(), rtol=0, atol=0)
                assert p.grad is not q.grad
        assert clone.get_parameter("head.weight").tag == "mine"
        assert clone.get_buffer("steps") is not model.get_buffer("steps")
        state, others = state_of(clone.layers[1]), state_of(clone.layers[0])
        assert (state.group.reduction.divide_factor, state.options.reshard_after_backward) == (5.0, False)
        assert (state.options.reshard.kind, state.options.reductions_in_flight) == (ReshardKind.NEVER, 7)
        assert others in unchecked, "the copy compares nothing, as the original does"
        assert state not in unchecked
        assert state.options.precision == policy
        model = clone
        task.loss(model, task.batch_of(1, rank)).backward()


def copy_parts() -> None:
    task, rank = TASKS["transformer"], dist.get_rank()
    plain, model = task.build(), shard_layers(task.build(), fully_shard)
    x = torch.randn(2, 6, 12)
    layer = copy.deepcopy(model.get_submodule("layers.0"))
    torch.testing.assert_close(layer(x), plain.get_submodule("layers.0")(x))
    layer(x).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(isinstance(p.grad, DTensor) for p in layer.parameters())
    wrapper = copy.deepcopy(Wrapper(model))
    assert wrapper.kept == [wrapper.model]
    tokens, _ = task.batch_of(0, rank)
    torch.testing.assert_close(wrapper(tokens), plain(tokens))
    layers = copy.deepcopy(model.get_submodule("layers"))
    assert type(layers) is nn.ModuleList
    torch.testing.assert_close(layers.get_submodule("1")(x), plain.get_submodule("layers.1")(x))
    listed = fully_shard([nn.Linear(4, 4), nn.Linear(4, 4)])
    with pytest.raises(ConfigurationError, match="Linear shares the group of 'Linear, Linear' with modules outside"):
        copy.deepcopy(listed[0])
    model = fully_shard(nn.Sequential(*listed))
    both = copy.deepcopy(model)
    assert state_of(both.get_submodule("0")) is state_of(both.get_submodule("1")) is not state_of(listed[0])
    torch.testing.assert_close(both(torch.ones(1, 4)), model(torch.ones(1, 4)))
    tied = TASKS["tied"].build()
    fully_shard(tied.embedding)
    fully_shard(tied.head, shared_from=[tied.embedding])
    for part in (tied.head, tied.embedding):
        with pytest.raises(ConfigurationError, match="Copy a sharded module that contains all of them"):
            copy.deepcopy(part)
    clone = copy.deepcopy(fully_shard(tied))
    assert clone.head.weight is clone.embedding.weight is not tied.head.weight
    TASKS["tied"].loss(clone, TASKS["tied"].batch_of(0, rank)).backward()
    assert clone.head.weight.grad is not None
    assert tied.head.weight.grad is None


def copy_chain_of_owners(order: tuple[int, ...]) -> None:
    """Copy layers of which each uses the weight of the one before, and which are in ``order`` in the model."""
    layers = [Link(None)]
    for _ in order[1:]:
        layers.append(Link(layers[-1]))
    for i, layer in enumerate(layers):
        fully_shard(layer, shared_from=layers[i - 1 : i])
    model = fully_shard(nn.Sequential(*(layers[i] for i in order)))
    clone = copy.deepcopy(model)
    copies = [clone[order.index(i)] for i in range(len(layers))]
    for owner, user in pairwise(copies):
        assert user.shared is owner.weight
        assert list(state_of(user).owner_states) == [state_of(owner)]
    x = torch.randn(2, 4)
    torch.testing.assert_close(clone(x), model(x), rtol=0, atol=0)
    clone(x).sum().backward()
    assert all(p.grad is not None for p in clone.parameters())
    assert all(p.grad is None for p in model.parameters())


def copy_on_meta_and_hybrid() -> None:
    with torch.device("meta"):
        model = shard_layers(Chain(), fully_shard)
    clone = copy.deepcopy(model)
    assert all(p.is_meta for p in clone.parameters())
    clone.to_empty(device="cpu")
    assert all(p.is_meta for p in model.parameters())
    source = shard_layers(TASKS["chain"].build(), fully_shard)
    clone.load_state_dict(source.state_dict())
    x = torch.randn(2, 8)
    torch.testing.assert_close(clone(x), source(x))
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1))
    replicated = shard_layers(TASKS["mlp"].build(), fully_shard, mesh=mesh)
    assert_equal_runs(trained(copy.deepcopy(replicated), "mlp"), trained(replicated, "mlp"))


def free_with_copy() -> None:
    """Check that pending gradients are not copied, hooks and methods are those of the copy, and nothing stays alive."""
    task, rank = TASKS["mlp"], dist.get_rank()
    model = shard_layers(task.build(), fully_shard)
    with no_sync(model):
        task.loss(model, task.batch_of(0, rank)).backward()
        clone = copy.deepcopy(model)
    assert all(p.grad is None for p in clone.parameters())
    task.loss(model, task.batch_of(1, rank)).backward()
    assert all(p.grad is None for p in clone.parameters())
    gone = ref(clone)
    del clone
    gc.collect()
    assert gone() is None
    with pytest.raises(UnsupportedError, match=r"^pickling a sharded .* save its state_dict\(\), or"):
        torch.save(model, io.BytesIO())


@pytest.mark.behaviour("A-18")
def test_a_copy_keeps_gradients_and_settings_and_shares_no_memory() -> None:
    run_ranks(everything_is_kept, 2)
    run_ranks(copy_parts, 2)
    run_ranks(copy_on_meta_and_hybrid, 2)
    for order in ((3, 2, 1, 0), (2, 0, 3, 1), (0, 1, 2)):
        run_ranks(copy_chain_of_owners, 2, order)
    run_ranks(free_with_copy, 2)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.generate(x)


@pytest.mark.behaviour("A-18", "C-08")
@on_ranks(2)
def test_registered_methods_of_a_copy_are_its_own() -> None:
    model = fully_shard(Generator())
    register_fsdp_forward_method(model, "generate")
    clone = copy.deepcopy(model)
    with torch.no_grad():
        for p in clone.parameters():
            p.zero_()
        assert clone.generate(torch.ones(2, 4)).count_nonzero() == 0
        assert clone(torch.ones(2, 4)).count_nonzero() == 0
        assert model.generate(torch.ones(2, 4)).count_nonzero() == 8
    assert model.generate.__name__ == "generate"
