"""Test which models an optimizer steps that holds parameters of several, some of them in other forms."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from composable_fsdp import fully_shard
from tests._internals import root_of, state_of
from tests.helpers.run_ranks import on_ranks
from tests.helpers.sharding import values_of

LocalForm = Callable[[Any], torch.Tensor]

FORMS: dict[str, LocalForm] = {
    "local tensors": lambda p: p.to_local().detach(),
    "parameters of local tensors": lambda p: nn.Parameter(p.to_local()),
    "slices of local tensors": lambda p: p.to_local().detach()[:1],
    "flat views": lambda p: p.to_local().detach().view(-1),
}


class Descent(torch.optim.Optimizer):
    """Gradient descent that writes through ``.data``, which no version counter sees."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.data.add_(p.grad.data, alpha=-0.5)


def build(number: int) -> Any:
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    fully_shard(model[0], reshard_after_forward=False)
    return fully_shard(model, reshard_after_forward=False)


def outputs(models: Iterable[nn.Module]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(torch.ones(2, 4)) for model in models]


@pytest.mark.behaviour("C-10")
@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_an_optimizer_steps_all_models_whose_shards_it_holds(form: str) -> None:
    """Step one model by its parameters and another by ``form``. Both keep their parameters after an evaluation."""
    models, untouched = (build(1), build(2)), build(3)
    sharded, given = [*models[0].parameters()], [FORMS[form](p).requires_grad_() for p in models[1].parameters()]
    of_others = [torch.ones(3, 3).to_sparse().requires_grad_(), nn.Embedding(3, 2, sparse=True).weight]
    optimizer = Descent([*given, *sharded, *of_others])
    before = outputs([*models, untouched])
    steps = root_of(state_of(untouched)).planner.steps.number
    for tensor in (*given, *sharded):
        tensor.grad = torch.ones_like(tensor)
    embedded = nn.functional.embedding(torch.tensor([1]), of_others[1], sparse=True)
    embedded.sum().backward()
    optimizer.step()
    after = outputs([*models, untouched])
    for index, model in enumerate(models):
        plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        plain.load_state_dict({name: value.detach() for name, value in values_of(model).items()})
        assert not torch.allclose(after[index], before[index])
        torch.testing.assert_close(after[index], plain(torch.ones(2, 4)))
    assert torch.equal(after[2], before[2])
    assert root_of(state_of(untouched)).planner.steps.number == steps
