"""Materialization, initialization and ignored modules on a single rank."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_fsdp import fully_shard, to_empty
from composable_fsdp.errors import ConfigurationError, ParameterError
from tests._internals import entries_of

pytestmark = [pytest.mark.behaviour("A-12"), pytest.mark.usefixtures("one_rank")]


class Tied(nn.Module):
    """Is on meta except for one buffer. Has a shared parameter, a shared buffer and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.first = nn.Linear(3, 3)
            self.second = nn.Linear(3, 3)
            self.norm = nn.BatchNorm1d(3)
            self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.second.weight = self.first.weight
        self.register_buffer("frequencies", torch.arange(4.0), persistent=False)
        self.first.register_buffer("shared", self.get_buffer("frequencies"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(x)))


def test_to_empty_keeps_values_and_sharing_and_names_unfilled_parameters() -> None:
    module = Tied()
    with pytest.warns(UserWarning, match="not persistent") as caught:
        assert to_empty(module, device="cpu") is module
    (warning,) = caught
    assert str(warning.message).startswith(
        "to_empty: buffers that are not persistent were on the meta device: ['cache']. They have no values yet"
    )
    assert warning.filename == __file__
    assert not any(t.is_meta for t in [*module.parameters(), *module.buffers()])
    assert torch.equal(module.get_buffer("frequencies"), torch.arange(4.0))
    assert module.second.weight is module.first.weight
    assert module.first.get_buffer("shared") is module.get_buffer("frequencies")
    with torch.no_grad():
        module.first.weight.fill_(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        to_empty(module, device="cpu")
    assert torch.equal(module.first.weight, torch.full((3, 3), 2.0)), "tensors with values must keep them"


class Init:
    """Allocates a module's own tensors, fills them with ones, and records the modules of its calls."""

    def __init__(self, *kinds: type[nn.Module]) -> None:
        self.called: list[nn.Module] = []
        self._kinds = kinds or (nn.Module,)

    def __call__(self, module: nn.Module) -> None:
        self.called.append(module)
        if isinstance(module, self._kinds):
            ones(module)


def ones(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        nn.init.ones_(tensor)


def test_the_init_function_runs_once_per_module_with_something_on_meta() -> None:
    module, init = Tied(), Init()
    module.add_module("real", nn.Linear(1, 1))
    fully_shard(module, param_init_fn=init)
    assert init.called == [module, module.first, module.second, module.norm]
    assert module.second.weight is module.first.weight
    assert all(isinstance(p, DTensor) and not p.is_meta for p in module.parameters())
    assert torch.equal(module.get_buffer("cache"), torch.ones(2))
    module(torch.randn(4, 3)).sum().backward()


def test_shared_parameters_are_initialised_once() -> None:
    module, init = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).to("meta"), Init()
    module[1].weight = module[0].weight
    fully_shard(module, param_init_fn=init)
    assert init.called == [module[0]]
    assert module[1].weight is module[0].weight


def test_nested_groups_and_ignored_modules_are_not_initialised_again() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    init = Init()
    fully_shard(module[0])
    fully_shard(module, param_init_fn=init, ignored_modules={module[2]})
    assert init.called == [module[1]]
    assert {n for n, p in module.named_parameters() if p.is_meta} == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_parameters_left_on_meta_by_the_init_function_are_named() -> None:
    with pytest.raises(ParameterError) as error:
        fully_shard(Tied(), param_init_fn=Init(nn.Linear))
    assert "these parameters and buffers of Tied are still on meta: ['cache', 'norm.weight', 'norm.bias'," in str(
        error.value
    )
    assert "to_empty(device=..., recurse=False)" in str(error.value)
    with pytest.raises(ConfigurationError, match="param_init_fn must be a function of a module, not bool"):
        fully_shard(Tied(), param_init_fn=True)  # type: ignore[arg-type]


@pytest.mark.behaviour("A-11")
def test_ignored_modules_are_unchanged() -> None:
    inner = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.BatchNorm1d(2))
    module = nn.Sequential(nn.Linear(2, 2), inner)
    module[0].weight = inner[0].weight  # shared with an ignored module, so it is ignored too
    before = {n: p for n, p in module.named_parameters(remove_duplicate=False) if n != "0.bias"}
    buffers = dict(module.named_buffers())
    fully_shard(module, ignored_modules=[inner], sync_module_states=True, param_init_fn=Init())
    after = dict(module.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in before.items())
    assert all(buffer is buffers[name] for name, buffer in module.named_buffers())
    assert after["1.0.bias"].is_meta
    assert isinstance(after["0.bias"], DTensor)
    for state in (module.state_dict(keep_vars=True), {n: e.value for n, e in entries_of(module).items()}):
        assert {n for n, value in state.items() if isinstance(value, DTensor)} == {"0.bias"}
        assert all(state[name] is parameter for name, parameter in before.items())


ITSELF = nn.Sequential(nn.Linear(1, 1))


@pytest.mark.behaviour("A-11")
@pytest.mark.parametrize(
    ("ignored", "message"),
    [
        (nn.ModuleList([nn.Linear(1, 1)]), "must be a set or list of modules, not one ModuleList."),
        ([nn.Parameter(torch.ones(1)), nn.ReLU()], "must contain modules only, not Parameter."),
        ({ITSELF}, "contains the Sequential that fully_shard was called on"),
        ({nn.Sequential(ITSELF)}, "contains the Sequential that fully_shard was called on"),
    ],
)
def test_ignored_modules_of_a_wrong_type_or_the_module_itself_are_an_error(ignored: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"ignored_modules {message}"):
        fully_shard(ITSELF, ignored_modules=ignored)
