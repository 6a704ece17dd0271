"""``apply_to_full_params`` calls a function on full parameters, one group at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable_fsdp import apply_to_full_params, fully_shard, unsharded_params
from composable_fsdp.errors import LifecycleError
from tests.helpers.models import TASKS
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.sharding import assert_exact, values_of
from tests.ranks.test_full_params import backward, built


@pytest.mark.behaviour("C-14")
@pytest.mark.parametrize(("task", "shape"), [("mlp", (2,)), ("tied", (2,)), ("mlp", (2, 2)), ("mlp", (1,))], ids=str)
@on_ranks("shape")
def test_a_function_applied_to_full_params_keeps_its_writes(task: str, shape: tuple[int, ...]) -> None:
    model, reference = built(task, shape), TASKS[task].build()
    values, seen = values_of(reference), []

    def double(name: str, parameter: nn.Parameter) -> None:
        assert type(parameter) is nn.Parameter
        assert_exact(parameter.detach(), values[name], name)
        shown = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
        assert name in shown
        assert len(shown) < len(values), "only one group is unsharded at a time"
        seen.append(name)
        parameter.mul_(2)

    objects = dict(model.named_parameters())
    apply_to_full_params(model, double)
    assert sorted(seen) == sorted(name for name, _ in reference.named_parameters()), (
        "a shared parameter is visited once"
    )
    assert all(p is objects[n] for n, p in model.named_parameters())
    for name, value in values_of(model).items():
        assert_exact(value, values[name] * 2, name)
    apply_to_full_params(model, lambda name, parameter: parameter.zero_(), writeback=False)
    for name, value in values_of(model).items():
        assert_exact(value, values[name] * 2, name)


def from_the_first_rank() -> None:
    model = built("mlp", (2,))
    names = [name for name, _ in model.named_parameters()]
    values, seen = values_of(model), []

    def add(name: str, parameter: nn.Parameter) -> None:
        seen.append(name)
        parameter.add_(1 + dist.get_rank())

    apply_to_full_params(model, add, rank0_only=True)
    assert sorted(seen) == (sorted(names) if dist.get_rank() == 0 else [])
    for name, value in values_of(model).items():
        assert_exact(value, values[name] + 1, name)


def gradients() -> None:
    model: Any = built("mlp", (2,))
    backward(model, "mlp")
    before = {n: p.grad.full_tensor() for n, p in model.named_parameters() if isinstance(p.grad, DTensor)}

    def halve(name: str, parameter: Any) -> None:
        assert_exact(parameter.grad, before[name], name)
        parameter.grad.div_(2)

    apply_to_full_params(model, halve, with_grads=True)
    for name, parameter in model.named_parameters():
        assert_exact(parameter.grad.full_tensor(), before[name] / 2, name)


class Stop(Exception):
    pass


def stops_on_the_way() -> None:
    """Check that an exception leaves the model sharded, a list is one group, and plain parameters are not visited."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    fully_shard([model[0], model[1]])
    fully_shard(model, ignored_modules=[model[2]])
    seen = []

    def stop(name: str, parameter: nn.Parameter) -> None:
        seen.append(name)
        parameter.zero_()
        if len(seen) == 4:
            raise Stop

    values = values_of(model)
    with pytest.raises(Stop):
        apply_to_full_params(model, stop)
    assert seen == ["0.weight", "0.bias", "1.weight", "1.bias"]
    for name, value in values_of(model).items():
        assert_exact(value, values[name], name)
    apply_to_full_params(model, lambda name, parameter: seen.append(name))
    assert not [name for name in seen if name.startswith("2.")]
    match = r"^unsharded_params was entered for .* inside another one"
    with unsharded_params(model), pytest.raises(LifecycleError, match=match):
        apply_to_full_params(model, stop)
    model(torch.ones(1, 3)).sum().backward()


@pytest.mark.behaviour("C-14")
def test_from_full_values_of_rank_0_gradients_and_errors() -> None:
    for case in (from_the_first_rank, gradients, stops_on_the_way):
        run_ranks(case, 2)
