"""Optimizer states by parameter name: in all forms, of plain optimizers, into new ones, on disk."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.testing import assert_close

from composable_fsdp import CPUOffloadPolicy, fully_shard, local_optimizer
from composable_fsdp.checkpoint import (
    Full,
    Local,
    Sharded,
    load,
    load_optimizer_state_dict,
    load_state_dict,
    optimizer_state_dict,
    save,
    state_dict,
)
from tests._internals import Form, parameter_names
from tests.helpers.checkpoint_worlds import all_ranks_raise
from tests.helpers.model_parallel import PAIRS, named_mesh, parallelize_pairs
from tests.helpers.models import TASKS, shard_layers
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.sharding import assert_exact
from tests.helpers.state_dicts import (
    FORMS,
    SAFE,
    LocalMomentum,
    build,
    full_state_of,
    message,
    same_values,
    scramble,
    shard,
    train,
)

Make = Callable[[Iterable[Any]], Optimizer]


def groups_of(model: nn.Module, *, backwards: bool = False) -> list[dict[str, Any]]:
    """Return groups with biases in their own group, without the ignored layer; ``backwards`` reverses the order."""
    named = [(n, p) for n, p in model.named_parameters() if not n.startswith("plain")]
    named = named[::-1] if backwards else named
    first = {"params": [p for n, p in named if not n.endswith("bias")], "weight_decay": 0.1}
    second = {"params": [p for n, p in named if n.endswith("bias")], "lr": 0.02}
    return [second, first] if backwards else [first, second]


def adamw(parameters: Iterable[Any]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-5, amsgrad=True)


def sgd(parameters: Iterable[Any]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class ColumnScaled(Optimizer):
    """Keeps one number for each column: a replicated DTensor with another shape than the parameter."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None and p.ndim > 1):
                energy = parameter.grad.square().sum(0, keepdim=True)
                if isinstance(energy, DTensor):
                    energy = energy.redistribute(placements=[Replicate()] * energy.device_mesh.ndim)
                state = self.state[parameter]
                state["energy"] = energy + state["energy"] if state else energy
                parameter.sub_(parameter.grad / (state["energy"].sqrt() + 1e-3), alpha=group["lr"])


MAKERS: dict[str, Make] = {
    "adamw": adamw,
    "local adamw": lambda p: local_optimizer(adamw(p)),
    "fused": lambda p: local_optimizer(torch.optim.Adam(p, lr=torch.tensor(0.01), eps=1e-5, fused=True)),
    "sgd": sgd,
    "columns": ColumnScaled,
}


def named_state(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    names = parameter_names(model)
    return {names[id(p)]: entry for p, entry in optimizer.state.items()}


def same_state(found: Mapping[str, Any], expected: Mapping[str, Any], *, exact: bool = True) -> None:
    assert set(found) == set(expected)
    for name, entry in expected.items():
        assert list(found[name]) == list(entry)
        for key, value in entry.items():
            what = f"{key} of {name}"
            if not isinstance(value, torch.Tensor):
                assert found[name][key] == value, what
                continue
            assert not isinstance(found[name][key], DTensor), what
            if exact:
                assert_exact(found[name][key], value, what)
            else:
                assert_close(found[name][key], value, msg=partial("{}: {}".format, what))


def resume(make: str, shape: tuple[int, ...], **options: Any) -> None:
    """Train, save, load every form into a new optimizer, and train on, with the results of the unsharded reference."""
    mesh = init_device_mesh("cpu", shape)
    factory = MAKERS[make]
    model, reference = shard(build(), mesh, wrap="before", **options), build()
    optimizer, other = factory(groups_of(model)), factory(groups_of(reference))
    assert optimizer_state_dict(model, optimizer)["state"] == {}
    for trained, it in ((model, optimizer), (reference, other)):
        train(trained, it)
    expected = named_state(reference, other)
    saved = {form: optimizer_state_dict(model, optimizer, form) for form in FORMS}
    full = saved[Full()]
    same_state(full["state"], expected, exact=False)
    assert "frozen" not in full["state"]
    assert full["param_groups"][1]["params"] == ["layers.0.bias", "layers.1.bias", "layers.2.bias", "layers.3.bias"]
    saved = copy.deepcopy(saved)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, optimizer, range(2, 4))
    train(reference, other, range(2, 4))
    after = optimizer_state_dict(model, optimizer, Full())
    for form in FORMS:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        fresh = factory(groups_of(model, backwards=True))
        load_optimizer_state_dict(model, fresh, saved[form], form)
        assert [g["lr"] for g in fresh.param_groups] == [g["lr"] for g in optimizer.param_groups][::-1]
        same_state(optimizer_state_dict(model, fresh, Full())["state"], full["state"])
        train(model, fresh, range(2, 4))
        same_state(optimizer_state_dict(model, fresh, Full())["state"], after["state"])


@pytest.mark.behaviour("F-09", "F-13")
@pytest.mark.parametrize("make", MAKERS)
def test_a_fresh_optimizer_resumes_from_every_form(make: str) -> None:
    run_ranks(resume, 2, make, (2,))


@pytest.mark.behaviour("F-09", "F-13")
@pytest.mark.parametrize("shape", [(1,), (4,), (2, 2)], ids=str)
def test_optimizers_resume_on_other_meshes_with_empty_shards(shape: tuple[int, ...]) -> None:
    run_ranks(resume, prod(shape), "local adamw", shape)


@pytest.mark.behaviour("F-09")
def test_state_of_offloaded_parameters() -> None:
    run_ranks(resume, 2, "adamw", (2,), offload_policy=CPUOffloadPolicy(pin_memory=False))


def mismatches(model: nn.Module, optimizer: Optimizer, before: dict[str, Any]) -> list[str]:
    def load(state: Any, form: Form | None = None, it: Optimizer = optimizer) -> str:
        return message(lambda: load_optimizer_state_dict(model, it, state, form))

    wrong = copy.deepcopy(before)
    wrong["state"]["flag"]["exp_avg"] = torch.zeros(2)
    wrong["state"]["unknown"] = {"step": torch.ones(())}
    wrong["param_groups"][0]["params"][0] = "unknown"
    fewer = {**before, "param_groups": before["param_groups"][:1]}
    local = optimizer_state_dict(model, optimizer, Local())
    one_less = copy.deepcopy(before)
    if dist.get_rank() == 1:
        del one_less["state"]["flag"]
    other = build()
    strange = message(lambda: optimizer_state_dict(model, adamw(other.parameters())))
    found = [
        load(wrong),
        load(wrong, it=adamw(groups_of(model))),
        load(fewer),
        load(local),
        load(before, Local()),
        load(one_less),
        load({"state": {0: {}}, "param_groups": []}),
        load({}),
        strange,
    ]
    same_state(optimizer_state_dict(model, optimizer, Full())["state"], before["state"])
    return found


def from_rank_0(model: nn.Module, optimizer: Optimizer, before: dict[str, Any]) -> str:
    rank = dist.get_rank()
    full = optimizer_state_dict(model, optimizer, Full(rank0_only=True, offload_to_cpu=True))
    assert bool(full) == (rank == 0)
    for given in (full or {}, full or None):
        fresh = adamw(groups_of(model, backwards=True))
        load_optimizer_state_dict(model, fresh, given, broadcast_from_rank0=True)  # type: ignore[arg-type]
        same_state(optimizer_state_dict(model, fresh, Full())["state"], before["state"])
    plain = build()
    fresh = adamw(groups_of(plain))
    load_optimizer_state_dict(plain, fresh, full, Full(rank0_only=True))
    same_state(named_state(plain, fresh), before["state"])
    wrong = {**full, "param_groups": []} if full else None
    fresh = adamw(groups_of(model))
    return message(lambda: load_optimizer_state_dict(model, fresh, wrong, Full(rank0_only=True)))  # type: ignore[arg-type]


def numbered(model: nn.Module, optimizer: Optimizer, before: dict[str, Any]) -> None:
    """Exchange state with plain optimizers, which number their parameters, through torch's names."""
    plain = build()
    theirs = adamw(groups_of(plain))
    train(plain, theirs)
    named = get_optimizer_state_dict(plain, theirs)
    load_optimizer_state_dict(model, optimizer, named)
    same_state(optimizer_state_dict(model, optimizer, Full())["state"], named_state(plain, theirs))
    again = adamw(groups_of(plain, backwards=True))
    set_optimizer_state_dict(plain, again, optimizer_state_dict(model, optimizer, Full()))
    same_state(named_state(plain, again), named_state(plain, theirs))
    assert [g["lr"] for g in again.param_groups] == [0.02, 0.01]
    load_optimizer_state_dict(model, optimizer, before)


def saved_to_disk(model: nn.Module, optimizer: Optimizer, before: dict[str, Any]) -> None:
    for form in FORMS:
        file = io.BytesIO()
        torch.save(optimizer_state_dict(model, optimizer, form), file)
        file.seek(0)
        fresh = adamw(groups_of(model))
        with torch.serialization.safe_globals(SAFE):
            load_optimizer_state_dict(model, fresh, torch.load(file, weights_only=True), form)
        same_state(optimizer_state_dict(model, fresh, Full())["state"], before["state"])


def hooked(model: nn.Module, optimizer: Optimizer, before: dict[str, Any]) -> str:
    seen: list[str] = []
    optimizer.register_state_dict_post_hook(
        lambda _, state: {**state, "param_groups": [{**group, "extra": 5} for group in state["param_groups"]]}
    )
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(f"in {state['param_groups'][0]['extra']}"))
    state = optimizer_state_dict(model, optimizer, Full())
    flag = optimizer.state[model.get_parameter("flag")]["exp_avg"]
    load_optimizer_state_dict(model, optimizer, state)
    assert optimizer.state[model.get_parameter("flag")]["exp_avg"] is flag
    train(model, optimizer)
    same_state(state["state"], before["state"])
    return ", ".join(seen)


@pytest.mark.behaviour("F-04", "F-05", "F-08", "F-09")
@on_ranks(2)
def test_mismatches_are_named_and_numbers_and_files_are_read() -> None:
    model = shard(build())
    optimizer = adamw(groups_of(model))
    train(model, optimizer)
    before = copy.deepcopy(optimizer_state_dict(model, optimizer, Full()))
    wrong, fresh, fewer, local, full, one_less, numbers, empty, strange = mismatches(model, optimizer, before)
    rank0 = from_rank_0(model, optimizer, before)
    numbered(model, optimizer, before)
    saved_to_disk(model, optimizer, before)
    assert wrong.splitlines() == [
        "the state dict does not fit AdamW. Nothing was loaded.",
        "  unexpected (2):",
        "    param_group of frozen, layers.0.weight, layers.1.weight, …: members: 5",
        "    unknown: state",
        "  of another shape (1):",
        "    flag.exp_avg: (2,), expected (1,)",
        "  no saved param_group has the parameters of group 0: flag, frozen, layers.0.weight, …",
    ]
    assert fresh == wrong
    assert "  no saved param_group has the parameters of group 1: layers.0.bias, layers.1.bias, " in fewer
    assert "    layers.0.weight.exp_avg: (4, 5), expected (7, 5) (on rank 0)" in local
    assert "    layers.0.weight.exp_avg: (7, 5), expected (4, 5) as this rank's part (on rank 0)" in full
    assert one_less.endswith("ranks were given state of different parameters")
    assert "parameters have numbers for names: pass what get_optimizer_state_dict of torch returns" in numbers
    assert "a state dict of an optimizer has 'state' and 'param_groups'; this one has not" in empty
    assert strange.startswith("this AdamW holds parameters that are not the model's, of shapes [(1,), (3,), (7, 5)")
    assert rank0.count("  no saved param_group has the parameters of group") == 2
    assert hooked(model, optimizer, before) == "in 5"


@pytest.mark.behaviour("F-09")
@on_ranks(2)
def test_the_state_of_an_optimizer_made_before_sharding_is_refused() -> None:
    model = build()
    optimizer = adamw(groups_of(model))
    train(model, optimizer)
    shard(model)
    saved = message(lambda: optimizer_state_dict(model, optimizer))
    assert saved.startswith("this AdamW was made before fully_shard, and holds what these parameters were then: [")
    assert saved.endswith("]. Make it afterwards.")
    assert message(lambda: load_optimizer_state_dict(model, optimizer, {})) == saved


@pytest.mark.behaviour("F-02", "F-04", "F-09")
@on_ranks(4)
def test_uneven_tensor_parallel_values_and_state_in_every_form() -> None:
    mesh, task = named_mesh(dp=2, tp=2), PAIRS

    def parallel() -> tuple[nn.Module, Optimizer]:
        model = task.build()
        parallelize_pairs(model, mesh["tp"])
        for layer in model.get_submodule("layers").children():
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        return model, local_optimizer(adamw(model.parameters()))

    model, optimizer = parallel()
    reference = task.build()
    other = adamw(reference.parameters())
    for trained, it in ((model, optimizer), (reference, other)):
        task.loss(trained, task.batch_of(0, 0)).backward()
        it.step()
    expected = named_state(reference, other)
    for form in FORMS:
        found = copy.deepcopy(optimizer_state_dict(model, optimizer, form))
        if form == Full():
            same_state(found["state"], expected, exact=False)
        assert not (isinstance(form, Full) and form.rank0_only and dist.get_rank()) or found == {}
        another, fresh = parallel()
        load_state_dict(scramble(another), copy.deepcopy(state_dict(model, form)), form)
        same_values(full_state_of(another), full_state_of(model))
        load_optimizer_state_dict(another, fresh, found, form)
        same_state(
            optimizer_state_dict(another, fresh, Full())["state"],
            optimizer_state_dict(model, optimizer, Full())["state"],
        )


@pytest.mark.behaviour("F-09")
@on_ranks(2)
def test_plain_shards_of_an_optimizer_have_the_local_form_only(tmp_path: Path) -> None:
    model = shard(build())
    optimizer = LocalMomentum(model.parameters())
    train(model, optimizer)
    before = copy.deepcopy(optimizer_state_dict(model, optimizer, Local()))
    text = r"momentum is a tensor with the checksum \w+ on rank 1 and .* on rank 0, but only one is saved\. Keep"
    for call in (
        lambda: save(tmp_path, model, optimizer),
        lambda: optimizer_state_dict(model, optimizer, Full()),
        lambda: optimizer_state_dict(model, optimizer, Sharded()),
    ):
        with all_ranks_raise(text):
            call()
    assert not list(tmp_path.glob("step-*"))
    train(model, optimizer)
    load_optimizer_state_dict(model, optimizer, before, Local())
    same_state(optimizer_state_dict(model, optimizer, Local())["state"], before["state"])


class Values(Optimizer):
    """Keeps ``value`` in the state of each parameter."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1})

    def keep(self, value: object) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["value"] = value


@pytest.mark.behaviour("F-09")
@on_ranks(2)
def test_numbers_and_texts_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    rank = dist.get_rank()
    model = shard_layers(TASKS["mlp"].build(), fully_shard)
    last = [*model.parameters()][-1]
    others = [p for p in model.parameters() if p is not last]
    for name, value, other in [
        ("a float", 0.5, 0.25),
        ("a text", "a" * 70 + "b", "a" * 70 + "c"),
        ("nested", {"k": [1, (2.0, "x")]}, {"k": [1, (2.0, "y")]}),
        ("none", None, 0),
    ]:
        optimizer = Values([{"params": others}, {"params": [last], "of group": 1}])
        optimizer.keep(value if rank else other)
        with all_ranks_raise(r"optimizer\.state\..*value.* is .* on rank 1 and .* on rank 0, but only one is saved"):
            save(tmp_path, model, optimizer)
        optimizer.keep(value)
        save(tmp_path / name, model, optimizer)
    for setting in (1 + rank, torch.tensor(0.1 + rank), {"betas": (0.9, 0.9 + rank / 100)}):
        optimizer = Values([{"params": others}, {"params": [last], "of group": setting}, {"params": [], "lr": rank}])
        with all_ranks_raise(r"the setting 'of group' of the param group of \S+ is .* on rank 1 and .* on rank 0, but"):
            save(tmp_path, model, optimizer)
    equal = float("nan")
    save(
        tmp_path / "equal",
        model,
        Values([{"params": others, "nan": equal}, {"params": [last]}, {"params": [], "lr": rank}]),
    )
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.behaviour("F-09")
@on_ranks(2)
def test_optimizers_of_the_stages_of_a_pipeline_are_one_checkpoint(tmp_path: Path) -> None:
    """Give each rank another pipeline stage, with its own learning rate; both have the same norm."""
    rank = dist.get_rank()

    def stage() -> tuple[nn.ModuleDict, Optimizer]:
        model = nn.ModuleDict({f"stage{rank}": nn.Linear(3, 3), "norm": nn.LayerNorm(3)})
        own: dict[str, Any] = {"params": list(model[f"stage{rank}"].parameters()), "lr": 0.1 + rank}
        return model, torch.optim.AdamW([own, {"params": list(model["norm"].parameters())}])

    model, optimizer = stage()
    model["norm"](model[f"stage{rank}"](torch.ones(2, 3))).square().sum().backward()
    optimizer.step()
    save(tmp_path, model, optimizer)
    fresh, fresh_optimizer = stage()
    load(tmp_path, fresh, fresh_optimizer)
    assert [group["lr"] for group in fresh_optimizer.param_groups] == [0.1 + rank, 1e-3]
    for (name, new), old in zip(fresh.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(new, old), name
        assert torch.equal(fresh_optimizer.state[new]["exp_avg"], optimizer.state[old]["exp_avg"]), name
