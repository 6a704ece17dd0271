"""What clients of torch's FSDP2 reach through private names: the state of a module, and torch's contract."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed._composable.contract import _get_registry

from composable_fsdp import FSDPModule, fully_shard
from composable_fsdp.lifecycle import ParameterState
from composable_fsdp.runtime.assemble import iteration_of
from composable_fsdp.runtime.unit import unit_of
from tests.ranks._sharding import single_rank

pytestmark = pytest.mark.behaviour("I-01")

torch_state: Any = torch_fsdp.fully_shard.state  # type: ignore[attr-defined]


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    with single_rank():
        yield


def chain() -> Any:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.ReLU())
    fully_shard(model[0])
    fully_shard(list(model[1]))
    return fully_shard(model)


def test_the_state_is_where_torch_looks_for_it() -> None:
    model = chain()
    for module in model.modules():
        assert (torch_state(module) is None) is not isinstance(module, FSDPModule)
        if isinstance(module, FSDPModule):
            assert module._get_fsdp_state() is torch_state(module)
    assert fully_shard.state(model) is torch_state(model)  # type: ignore[attr-defined]


def test_all_states_are_those_of_the_root_each_group_once() -> None:
    model = chain()
    model(torch.ones(2, 3))
    states = torch_state(model)._state_ctx.all_states
    assert states == [torch_state(model), torch_state(model[0]), torch_state(model[1][0])]
    assert states == torch_state(model[0])._state_ctx.all_states
    assert [len(state._fsdp_param_groups) for state in states] == [0, 1, 1]
    assert torch_state(model)._fsdp_param_group is None
    assert torch_state(model[1][1])._fsdp_param_group is None, "its group shows with the first of the list"
    group = torch_state(model[1][0])._fsdp_param_group
    assert (group._module_fqn, len(group.fsdp_params)) == ("1.0, 1.1", 4)


def test_parameters_show_in_both_forms() -> None:
    model = chain()
    (weight, bias) = torch_state(model[0])._fsdp_param_group.fsdp_params
    assert weight.sharded_param is model[0].weight
    assert bias.sharded_param is model[0].bias
    model[0].unshard()
    assert weight.unsharded_param is weight._unsharded_param is model[0].weight


def test_a_client_can_end_the_accumulation_of_microbatches() -> None:
    model = chain()
    model.set_is_last_backward(False)
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    expected = copy.deepcopy(model)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
    assert all(p.grad is None for p in sharded_parameters(model))
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    state = torch_state(model)
    for each in state._state_ctx.all_states:
        for group in each._fsdp_param_groups:
            group.post_backward()
            assert unit_of(model[0]).group.parameter_state is ParameterState.SHARDED
    state._root_post_backward_final_callback()
    expected.set_requires_gradient_sync(True)
    (2 * expected(torch.ones(2, 3)).sum()).backward()
    for actual, wanted in zip(sharded_parameters(model), sharded_parameters(expected), strict=True):
        assert torch.equal(actual.grad.to_local(), wanted.grad.to_local())


def sharded_parameters(model: nn.Module) -> list[Any]:
    units = {unit_of(module): None for module in model.modules() if isinstance(module, FSDPModule)}
    return [parameter.sharded for unit in units for parameter in unit.group.parameters]


def test_gradients_that_a_client_put_on_unsharded_parameters_are_reduced() -> None:
    model: Any = fully_shard(nn.Linear(3, 3), reshard_after_forward=False)
    out = model(torch.ones(2, 3)).sum()
    unsharded = list(model.parameters())
    model.set_reshard_after_backward(False)
    for parameter, gradient in zip(unsharded, torch.autograd.grad(out, unsharded), strict=True):
        parameter.grad = gradient
    torch_state(model)._fsdp_param_group.post_backward()
    torch_state(model)._root_post_backward_final_callback()
    model.reshard()
    assert torch.equal(model.weight.grad.to_local(), torch.full((3, 3), 2.0))


def test_hooks_come_off_and_go_on_again_with_something_around_them() -> None:
    model: Any = fully_shard(nn.Linear(3, 3))
    state, calls = torch_state(model), []
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    group = state._fsdp_param_group

    def around(name: str, function: Any) -> Any:
        def inner(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        return inner

    pre = around("pre-forward", state._pre_forward)
    state._pre_forward_hook_handle = model.register_forward_pre_hook(pre, prepend=True, with_kwargs=True)
    state._post_forward_hook_handle = model.register_forward_hook(around("post-forward", state._post_forward))
    group.pre_backward = around("pre-backward", group.pre_backward)
    group.post_backward = around("post-backward", group.post_backward)

    model(torch.ones(2, 3)).sum().backward()
    assert list(dict.fromkeys(calls)) == ["pre-forward", "post-forward", "pre-backward", "post-backward"]
    assert torch.equal(model.weight.grad.to_local(), torch.full((3, 3), 2.0))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 4))
    model(torch.ones(2, 3)).sum().backward()


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self(x) + self.inner(x)
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


def test_torchs_own_registration_of_forward_methods_works_on_ours() -> None:
    model: Any = fully_shard(Scorer())
    torch_fsdp.register_fsdp_forward_method(model, "score")
    for _ in range(2):
        model.score(torch.ones(2, 3)).sum().backward()
        assert torch.equal(model.inner.weight.grad.to_local(), torch.full((3, 3), 4.0))
        assert unit_of(model).group.parameter_state is ParameterState.SHARDED
        model.zero_grad()


def test_torchs_own_share_comm_ctx_works_on_ours() -> None:
    first, second = chain(), chain()
    torch_fsdp.share_comm_ctx([first, second])
    assert iteration_of(unit_of(first)).lanes is iteration_of(unit_of(second)).lanes


def test_a_copy_has_a_state_of_its_own() -> None:
    model = chain()
    clone = copy.deepcopy(model)
    state = torch_state(clone[0])
    assert state is not torch_state(model[0])
    assert state._fsdp_param_group.fsdp_params[0].sharded_param is clone[0].weight
    state._pre_forward_hook_handle.remove()
    assert len(model[0]._forward_pre_hooks) == 1
    assert len(clone[0]._forward_pre_hooks) == 0


def test_torchs_contract_knows_that_a_module_is_sharded() -> None:
    model = chain()
    assert "fully_shard" in (_get_registry(model[0]) or {})
    with pytest.raises(RuntimeError, match=r"Module already managed by `fully_shard`"):
        replicate(model)
    with pytest.raises(AssertionError, match="fully_shard has already been applied"):
        torch_fsdp.fully_shard(model)


def test_dynamo_finds_its_marks_on_all_modules() -> None:
    for module in chain().modules():
        assert module._is_fsdp_managed_module is True
        assert module._fsdp_use_orig_params is True
