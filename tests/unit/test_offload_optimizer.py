"""Optimizer state that rests in host memory, on one rank: bits, memory and state dicts."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from composable_fsdp import Muon, fully_shard, local_optimizer, offload_optimizer, owner_step
from composable_fsdp.checkpoint import load, save
from composable_fsdp.errors import ArgumentTypeError, ConfigurationError
from tests._internals import is_host
from tests.helpers.host_as_device import host_as_device, offload
from tests.helpers.sharding import assert_exact, full_value

pytestmark = pytest.mark.usefixtures("own_rank")

BUCKET = 3000
"""Bytes of a bucket: some parameters share one, and some are larger."""


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with host_as_device():
        yield


def build(*, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 31), nn.Tanh(), nn.Linear(31, 17), nn.Tanh(), nn.Linear(17, 3)).to(dtype)
    model.frozen = nn.Linear(5, 5).requires_grad_(False)
    return fully_shard(model)


def set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        if p.requires_grad:
            value = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.grad = torch.zeros_like(p)
            local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            local.copy_(value)


def train(model: nn.Module, optimizer: Optimizer, steps: range = range(4)) -> None:
    for step in steps:
        set_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()


def tensors_of(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Return copies of all parameters, and of all tensors of the state."""
    found = {name: full_value(p).clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for path, value in pytree.tree_flatten_with_path(dict(optimizer.state.get(p, {})))[0]:
            key = f"{name}{pytree.keystr(path)}"
            found[key] = full_value(value).clone() if isinstance(value, torch.Tensor) else value
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert_exact(found[name], value, name)
        else:
            assert found[name] == value, name


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1),
    "adamw-foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, foreach=True),
    "adamw-fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=0.1, amsgrad=True),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
}


@pytest.mark.behaviour("C-01", "D-02")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_offloaded_state_gives_the_bits_of_the_plain_step(kind: str, dtype: torch.dtype) -> None:
    expected, model = build(dtype=dtype), build(dtype=dtype)
    plain = OPTIMIZERS[kind](expected)
    optimizer = offload(OPTIMIZERS[kind](model), bucket_bytes=BUCKET)
    for step in range(5):
        for each, of in ((expected, plain), (model, optimizer)):
            train(each, of, range(step, step + 1))
        assert_same(tensors_of(model, optimizer), tensors_of(expected, plain))


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def squares(count: int, numel: int = 64) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.ones(numel)) for _ in range(count))


class Watched(torch.optim.Adam):
    """Notes the parameters of each update, and the bytes of the memory that their state is in."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, amsgrad=True)
        self.parameters: list[int] = []
        self.nbytes: list[int] = []

    def step(self, closure: Any = None) -> Any:
        self.parameters.append(len(self.param_groups[0]["params"]))
        entries = [self.state[p] for p in self.param_groups[0]["params"] if p in self.state]
        storages = {storage_of(v): v.untyped_storage().nbytes() for e in entries for v in e.values() if v.ndim}
        self.nbytes.append(sum(storages.values()))
        return cast(Any, torch.optim.Adam).step.__wrapped__(self, closure)


def test_a_step_has_two_buckets_of_the_given_bytes_on_the_device() -> None:
    model, made, empty = squares(12), list[int](), torch.empty  # 768 bytes of state each
    optimizer = offload(Watched(model), bucket_bytes=2048)
    train(model, optimizer, range(1))
    rests = {storage_of(v) for e in optimizer.state.values() for v in e.values() if v.ndim}
    for noted in (optimizer.parameters, optimizer.nbytes):
        noted.clear()

    def noting(size: int, **options: Any) -> torch.Tensor:
        made.append(size)
        return empty(size, **options)

    with mock.patch.object(torch, "empty", noting):
        train(model, optimizer, range(3))
    assert optimizer.parameters == [2] * 6 * 3
    assert optimizer.nbytes == [1536] * 6 * 3  # the slot of the bucket that is stepped
    assert made == [1536] * 2 * 3  # slots
    assert {storage_of(v) for e in optimizer.state.values() for v in e.values() if v.ndim} == rests


class Replacing(Optimizer):
    """Has a new tensor as state after each step. ``alive`` counts at each update those of the update before."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.alive.append(sum(each() is not None for each in self.made))
        self.made.clear()
        for parameter in self.param_groups[0]["params"]:
            new = self.state[parameter].get("sum", 0) + parameter.grad
            self.state[parameter] = {"sum": new}
            self.made.append(weakref.ref(new))


def test_replaced_state_is_freed_before_the_next_update() -> None:
    model = squares(5)
    optimizer = offload(Replacing(model), bucket_bytes=256)
    train(model, optimizer, range(3))
    assert optimizer.alive == [0] * 5 * 3


def test_an_offloaded_optimizer_is_freed_with_its_state() -> None:
    model = build()
    optimizer = offload(OPTIMIZERS["adamw"](model))
    train(model, optimizer, range(2))
    objects = [weakref.ref(optimizer), weakref.ref(next(iter(optimizer.state.values()))["exp_avg"])]
    gc.disable()
    try:
        del optimizer
        assert [each() for each in objects] == [None] * 2
    finally:
        gc.enable()


def test_state_of_parameters_in_host_memory_stays_there() -> None:
    expected, model = build(), build()
    plain = OPTIMIZERS["adamw"](expected)
    with mock.patch.dict(inspect.unwrap(offload_optimizer).__globals__, is_host=is_host):
        optimizer = offload_optimizer(OPTIMIZERS["adamw"](model))
        train(model, optimizer)
    train(expected, plain)
    assert_same(tensors_of(model, optimizer), tensors_of(expected, plain))


class Counting(Optimizer):
    """Counts calls in its groups, and keeps nested state, numbers, and a new tensor in each step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.5, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None, *, scale: float = 1.0) -> Any:
        for group in self.param_groups:
            group["count"] += 1
            group["last"] = group.get("last", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["calls"] = state.get("calls", 0) + 1
                    state["sum"] = state.get("sum", 0) + parameter.grad
                    state.setdefault("nested", {"list": [torch.zeros(2, 3).T, "text"]})["list"][0].add_(1)
                    parameter.sub_(state["sum"], alpha=group["lr"] * scale)


def test_settings_and_state_of_any_form_are_those_of_one_step() -> None:
    expected, model = squares(7), squares(7)
    optimizers = []
    for each in (expected, model):
        groups = [{"params": list(each)[:4]}, {"params": list(each)[4:], "lr": 0.25}]
        optimizers.append(Counting(groups))
    plain, optimizer = optimizers
    offload(optimizer, bucket_bytes=600)
    for step in range(3):
        for each, of in ((expected, plain), (model, optimizer)):
            set_gradients(each, step)
            of.step(scale=0.5)
        assert_same(tensors_of(model, optimizer), tensors_of(expected, plain))
    for group, other in zip(optimizer.param_groups, plain.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {k: v for k, v in other.items() if k != "params"}
    nested = optimizer.state[model[6]]["nested"]["list"]
    assert nested[0].tolist() == [[3, 3]] * 3
    assert nested[0].stride() == (1, 3)
    assert nested[1] == "text"


def test_hooks_closures_and_schedulers_see_one_step() -> None:
    expected, model = build(), build()
    calls: list[tuple[str, int]] = []
    optimizers = [OPTIMIZERS["adamw-fused"](expected), OPTIMIZERS["adamw-fused"](model)]
    offload(optimizers[1], bucket_bytes=BUCKET)
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(lambda o, *_: calls.append(("before", len(o.param_groups[0]["params"]))))
        optimizer.register_step_post_hook(lambda o, *_: calls.append(("after", len(o.param_groups[0]["params"]))))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]
    seen = []
    for each, optimizer, scheduler in zip((expected, model), optimizers, schedulers, strict=True):
        calls.clear()
        for step in range(2):

            def closure(each: nn.Module = each, optimizer: Optimizer = optimizer, step: int = step) -> float:
                optimizer.zero_grad()
                set_gradients(each, step)
                calls.append(("closure", torch.is_grad_enabled()))
                return 3.5

            assert optimizer.step(closure) == 3.5
            scheduler.step()
        seen.append(list(calls))
    assert seen[0] == seen[1]
    assert_same(tensors_of(model, optimizers[1]), tensors_of(expected, optimizers[0]))


def test_changes_by_others_between_steps_are_followed() -> None:
    """Write to state in place, replace it, delete it, add parameters, and load a state dict around the hooks."""
    pairs = []
    for offloaded in (False, True):
        model = build()
        optimizer = OPTIMIZERS["adamw"](model)
        if offloaded:
            offload(optimizer, bucket_bytes=BUCKET)
        train(model, optimizer, range(2))
        first, second, third = [p for p in model.parameters() if p.requires_grad][:3]
        optimizer.state[first]["exp_avg"].mul_(2)
        optimizer.state[second]["exp_avg_sq"] = torch.ones_like(second, requires_grad=False)
        del optimizer.state[third]
        train(model, optimizer, range(2, 3))
        model.added = nn.Parameter(torch.ones(3, 4))
        optimizer.add_param_group({"params": [model.added], "lr": 0.25})
        train(model, optimizer, range(3, 5))
        pairs.append((model, optimizer))
    (expected, plain), (model, optimizer) = pairs
    assert_same(tensors_of(model, optimizer), tensors_of(expected, plain))


def test_a_failed_update_leaves_all_state_at_rest() -> None:
    model, expected = squares(6), squares(6)
    plain, optimizer = torch.optim.AdamW(expected), torch.optim.AdamW(model)
    offload(optimizer, bucket_bytes=1024)
    train(expected, plain, range(2))
    train(model, optimizer, range(2))
    rests = {storage_of(optimizer.state[p]["exp_avg"]) for p in model}
    set_gradients(model, 2)
    model[3].grad = torch.ones(64).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [6]
    assert {storage_of(optimizer.state[p]["exp_avg"]) for p in model} == rests
    set_gradients(expected, 2)
    for p in list(expected)[2:]:
        p.grad = None
    plain.step()
    for step in range(2, 4):
        for each, of in ((expected, plain), (model, optimizer)):
            set_gradients(each, step)
            for p in list(each)[:2] if step == 2 else ():
                p.grad = None
            of.step()
    found, wanted = tensors_of(model, optimizer), tensors_of(expected, plain)
    assert_same({k: v for k, v in found.items() if k[0] in "0145"}, {k: v for k, v in wanted.items() if k[0] in "0145"})


@pytest.mark.behaviour("F-07", "F-08")
@pytest.mark.parametrize("kind", ["adamw", "adamw-fused"])
def test_state_dicts_and_checkpoints_are_those_of_the_plain_optimizer(kind: str, tmp_path: Path) -> None:
    expected, model = build(), build()
    plain = OPTIMIZERS[kind](expected)
    optimizer = offload(OPTIMIZERS[kind](model), bucket_bytes=BUCKET)
    train(expected, plain, range(2))
    train(model, optimizer, range(2))
    save(tmp_path / "run", model, optimizer, step=2)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "file.pt")
    sharded = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    train(expected, plain, range(2, 4))
    wanted = tensors_of(expected, plain)
    train(model, optimizer, range(2, 4))
    assert_same(tensors_of(model, optimizer), wanted)

    def load_ours(new: nn.Module, into: Optimizer) -> None:
        load(tmp_path / "run", new, into)

    def load_file(new: nn.Module, into: Optimizer) -> None:
        saved = torch.load(tmp_path / "file.pt", weights_only=False)
        new.load_state_dict(saved["model"])
        into.load_state_dict(saved["optimizer"])

    def load_torchs(new: nn.Module, into: Optimizer) -> None:
        load(tmp_path / "run", new)
        set_optimizer_state_dict(new, into, copy.deepcopy(sharded))

    for load_into in (load_ours, load_file, load_torchs):
        fresh = build()
        into_fresh = offload(OPTIMIZERS[kind](fresh), bucket_bytes=BUCKET)
        for each, into in ((fresh, into_fresh), (model, optimizer)):  # also into one that has state
            load_into(each, into)
            train(each, into, range(2, 4))
            assert_same(tensors_of(each, into), wanted)


def test_loading_copies_nothing_to_the_device_and_nothing_is_shared() -> None:
    model, other = squares(3), squares(3)
    plain = torch.optim.AdamW(other)
    train(other, plain)
    optimizer = offload(torch.optim.AdamW(model))
    seen: list[Any] = []
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.extend(state["state"][0].values()))
    saved = plain.state_dict()
    optimizer.load_state_dict(saved)
    assert not any(isinstance(value, torch.Tensor) and value.ndim for value in seen)
    assert all(v.ndim == 0 or isinstance(v, torch.Tensor) for v in saved["state"][0].values())
    before = plain.state[other[0]]["exp_avg"].clone()
    optimizer.state[model[0]]["exp_avg"].zero_()
    assert_exact(plain.state[other[0]]["exp_avg"], before, "the loaded state dict")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"])
def test_a_copy_is_an_ordinary_optimizer_with_the_same_state(copied: Callable[[Any], Any]) -> None:
    model = squares(5)
    optimizer = offload(torch.optim.AdamW(model), bucket_bytes=1024)
    train(model, optimizer, range(2))
    other = copied(optimizer)
    assert "step" not in vars(other)
    parameters = other.param_groups[0]["params"]
    for p, q in zip(model, parameters, strict=True):
        assert_exact(other.state[q]["exp_avg"], optimizer.state[p]["exp_avg"].clone(), "exp_avg")
        q.grad = torch.ones_like(q)
    other.step()
    train(model, optimizer, range(2, 3))


@pytest.mark.behaviour("H-02")
def test_wrong_arguments_are_named() -> None:
    model = squares(2)
    with pytest.raises(ArgumentTypeError, match=r"^offload_optimizer takes an optimizer, .* not 3\.$"):
        offload_optimizer(cast(Any, 3))
    optimizer = torch.optim.AdamW(model)
    text = r"^bucket_bytes must be positive, not 0\.$"
    with pytest.raises(ConfigurationError, match=text):
        offload_optimizer(optimizer, bucket_bytes=0)
    text = (
        r"^(LBFGS|Muon) steps its parameters together, so its state cannot be offloaded in buckets\. Use it as it is;"
    )
    for other in (torch.optim.LBFGS(model), Muon(model)):
        with pytest.raises(ConfigurationError, match=text):
            offload_optimizer(other)
    with pytest.raises(ArgumentTypeError, match=r"^offload_optimizer has no to= in this version: state rests in host"):
        offload_optimizer(optimizer, to="/scratch/state")  # type: ignore[call-arg]
    scheduled, local, owned = (torch.optim.AdamW(model) for _ in range(3))
    torch.optim.lr_scheduler.ExponentialLR(scheduled, 0.5)
    text = r"^the step of this AdamW has been replaced already, .* Call offload_optimizer once, before anything else"
    for replaced in (scheduled, local_optimizer(local), owner_step(owned), offload(optimizer)):
        with pytest.raises(ConfigurationError, match=text):
            offload(replaced)
