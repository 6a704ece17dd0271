"""State and settings of optimizers of any form, saved and loaded by one process."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from composable_fsdp.checkpoint import load, load_optimizer_state_dict, optimizer_state_dict, save
from composable_fsdp.errors import CheckpointError
from tests.helpers.extension_tensors import Pair


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def with_empty_groups(model: nn.Linear, *rates: float) -> torch.optim.Optimizer:
    none, weight, again, bias = rates
    params: Any = ([], [model.weight], [], [model.bias])
    groups = [{"params": p, "lr": lr} for p, lr in zip(params, (none, weight, again, bias), strict=True)]
    return torch.optim.SGD(groups, lr=9.0, momentum=0.5)


@pytest.mark.parametrize("way", ["file", "state dict"])
def test_each_empty_group_has_its_own_settings(tmp_path: Path, way: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = trained(model, with_empty_groups(model, 0.1, 0.2, 0.3, 0.4))
    fresh = with_empty_groups(model, 5.0, 6.0, 7.0, 8.0)
    if way == "file":
        load(save(tmp_path, model, optimizer).path, model, fresh)
    else:
        load_optimizer_state_dict(model, fresh, optimizer_state_dict(model, optimizer))
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.2, 0.3, 0.4]


def test_an_empty_group_that_was_not_saved_is_named(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    fewer: Any = with_empty_groups(model, 0.1, 0.2, 0.3, 0.4)
    fewer.param_groups.pop(0)
    save(tmp_path, model, trained(model, fewer))
    with pytest.raises(CheckpointError, match=r"no saved param_group has the parameters of group 2: \n?"):
        load(tmp_path, model, with_empty_groups(model, 0.1, 0.2, 0.3, 0.4))
    save(tmp_path, model, with_empty_groups(model, 0.1, 0.2, 0.3, 0.4))
    with pytest.raises(CheckpointError, match="param_group of no parameters: members: 0"):
        load(tmp_path, model, fewer)


class Keeping(torch.optim.SGD):
    """Keeps ``kept(gradient)`` as the state of each parameter."""

    def __init__(self, params: Any, kept: Any) -> None:
        super().__init__(params, lr=0.1)
        self.kept = kept

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter] |= self.kept(parameter.grad.clone())
        super().step(closure)


def text_of(tree: Any) -> str:
    """Return types, keys and values of ``tree``."""
    if isinstance(tree, Mapping):
        return f"{type(tree).__name__}({', '.join(f'{key!r}: {text_of(value)}' for key, value in tree.items())})"
    if isinstance(tree, (list, tuple, deque)):
        return f"{type(tree).__name__}({', '.join(map(text_of, tree))}){getattr(tree, 'maxlen', '')}"
    return f"tensor {tree.tolist()}" if isinstance(tree, torch.Tensor) else repr(tree)


TREES: dict[str, Any] = {
    "int keys": lambda g: {0: g, 7: 3, "deep": {2: g}},
    "list of tuples": lambda g: {"pairs": [(g, 2 * g), (g + 1, None)]},
    "deque": lambda g: {"last": deque([g, 3 * g], maxlen=4)},
    "ordered": lambda g: {"by name": OrderedDict(z=g, a=OrderedDict(b=[g, 1.5]))},
    "no tensors": lambda g: {"history": [1, 2.5], "span": (0.9, 0.99), "names": {1: "a"}, "nothing": None, "none": {}},
    "text": lambda g: {"phase": "warm", "words": ["a", ("b", g)], "raw": b"\x00"},
}


@pytest.mark.behaviour("F-09")
@pytest.mark.parametrize("way", ["file", "state dict"])
@pytest.mark.parametrize("kept", TREES.values(), ids=TREES)
def test_trees_of_any_containers_come_back(tmp_path: Path, kept: Any, way: str) -> None:
    model = nn.Linear(2, 2)
    optimizer, fresh = trained(model, Keeping(model.parameters(), kept)), Keeping(model.parameters(), kept)
    if way == "file":
        load(save(tmp_path, model, optimizer).path, model, fresh)
    else:
        load_optimizer_state_dict(model, fresh, optimizer_state_dict(model, optimizer))
    for parameter in model.parameters():
        assert text_of(fresh.state[parameter]) == text_of(optimizer.state[parameter])


@pytest.mark.behaviour("F-09")
def test_state_of_no_parameter_is_refused_by_its_key(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer, fresh = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for _ in range(2))
    trained(model, optimizer)
    good = optimizer_state_dict(model, optimizer)
    others: Any = {"schedule": {"count": 5, "mean": torch.tensor([1.0, 2.0])}, 1: 3, ("a", 1): [torch.ones(2)]}
    cast(Any, optimizer.state).update(others)
    expected = "this SGD has state that is of no parameter, under 'schedule', ('a', 1), 1. Save it in extra: "
    for saves in (lambda: save(tmp_path, model, optimizer), lambda: optimizer_state_dict(model, optimizer)):
        with pytest.raises(CheckpointError) as raised:
            saves()
        assert expected in str(raised.value)
    assert not list(tmp_path.glob("step-*"))
    with pytest.raises(CheckpointError, match=r"unexpected \(2\):\n *total: state\n *calls: no state of a parameter$"):
        load_optimizer_state_dict(model, fresh, {**good, "state": {**good["state"], "total": 3}, "calls": 8})


def error_of(tmp_path: Path, change: Any) -> str:
    model = nn.Linear(2, 2)
    optimizer = trained(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    change(optimizer, model)
    with pytest.raises(CheckpointError) as raised:
        save(tmp_path, model, optimizer)
    assert not list(tmp_path.glob("step-*"))
    return str(raised.value)


def test_state_that_no_key_can_have_is_refused(tmp_path: Path) -> None:
    def stray(optimizer: torch.optim.Optimizer, _: nn.Module) -> None:
        optimizer.state[nn.Parameter(torch.ones(3, 4))] = {"count": 5}

    def twice(optimizer: torch.optim.Optimizer, model: nn.Linear) -> None:
        optimizer.state[model.weight] |= {0: torch.ones(1), "0": torch.ones(1)}

    assert "state for a parameter of shape (3, 4) of no group" in error_of(tmp_path, stray)
    assert "two values of the optimizer are both called optimizer.state.weight.0 without types and dots" in error_of(
        tmp_path, twice
    )


def test_a_read_of_the_state_of_another_parameter_does_no_harm(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([model.weight], lr=0.1, momentum=0.9)
    assert optimizer.state[model.bias] == {}
    save(tmp_path, model, trained(model, optimizer))


class Wrapped:
    """An optimizer around another one, without hooks and defaults, that adds state of its own if it has any."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.calls = inner, 0

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict() | ({"calls": self.calls} if self.calls else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


def test_wrappers_of_optimizers_are_saved_by_their_own_state_dict(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    inner, new = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for _ in range(2))
    wrapped, fresh = (cast(Any, Wrapped(each)) for each in (inner, new))
    trained(model, inner)
    load(save(tmp_path, model, wrapped).path, model, fresh)
    assert torch.equal(new.state[model.weight]["momentum_buffer"], inner.state[model.weight]["momentum_buffer"])
    wrapped.calls = 8
    with pytest.raises(CheckpointError, match=r"this Wrapped has state that is of no parameter, under 'calls'\. Save"):
        save(tmp_path, model, wrapped)
    wrapped.state_dict = lambda: {"base": {}, "k": 3}
    expected = (
        r"the state_dict\(\) of this Wrapped has \['base', 'k'\], not the 'state' and 'param_groups' of its param"
    )
    with pytest.raises(CheckpointError, match=expected):
        save(tmp_path, model, wrapped)


def test_hooks_of_state_dict_change_what_is_saved(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer, fresh = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for _ in range(2))
    trained(model, optimizer)

    def halve(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        halved = {k: {"momentum_buffer": e["momentum_buffer"] / 2} for k, e in state["state"].items()}
        return {"state": halved, "param_groups": [{**g, "lr": 7.0} for g in state["param_groups"]]}

    optimizer.register_state_dict_post_hook(halve)
    seen = []
    fresh.register_load_state_dict_pre_hook(lambda _, state: seen.append(state["param_groups"][0]["lr"]))
    load(save(tmp_path, model, optimizer).path, model, fresh)
    assert (seen, fresh.param_groups[0]["lr"]) == ([7.0], 7.0)
    expected = optimizer.state[model.weight]["momentum_buffer"] / 2
    assert torch.equal(fresh.state[model.weight]["momentum_buffer"], expected)


@pytest.mark.parametrize("way", ["file", "state dict"])
def test_what_a_load_of_the_optimizer_makes_stays(tmp_path: Path, way: str) -> None:
    """Steps of old versions become tensors, hooks add state, and scalars of bf16 parameters keep their dtype."""
    model = nn.Linear(2, 2).bfloat16()
    optimizer, fresh = (torch.optim.NAdam(model.parameters(), lr=0.1) for _ in range(2))
    for _ in range(3):
        model(torch.ones(1, 2).bfloat16()).sum().backward()
        optimizer.step()
    optimizer.register_state_dict_post_hook(lambda _, state: state["state"][1].update(step=3))
    fresh.register_load_state_dict_post_hook(lambda found: found.state[model.bias].update(added=7))
    if way == "file":
        load(save(tmp_path, model, optimizer).path, model, fresh)
    else:
        load_optimizer_state_dict(model, fresh, optimizer_state_dict(model, optimizer))
    (product, loaded) = (each.state[model.bias]["mu_product"] for each in (optimizer, fresh))
    assert (loaded.dtype, loaded) == (torch.float32, product)
    assert fresh.state[model.bias]["added"] == 7
    assert isinstance(fresh.state[model.bias]["step"], torch.Tensor)


def test_new_state_of_the_class_of_its_parameter_has_the_saved_dtype(tmp_path: Path) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(Pair(*torch.ones(2, 3, 2).bfloat16()))
    optimizer, fresh = (Keeping(model.parameters(), None) for _ in range(2))
    optimizer.state[model.weight]["average"] = average = Pair(*torch.full((2, 3, 2), 1.001))
    load(save(tmp_path, model, optimizer).path, model, fresh)
    assert torch.equal(fresh.state[model.weight]["average"].left, average.left)
