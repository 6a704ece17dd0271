"""State dicts in three forms: names, values, and the way back."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing import assert_close

from composable_fsdp import (
    CheckpointError,
    ConfigurationError,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ShardPlacementResult,
    fully_shard,
    to_empty,
)
from composable_fsdp.checkpoint import (
    Full,
    Local,
    Sharded,
    forms,
    holders,
    load_state_dict,
    state_dict,
    state_dict_form,
    tensor_forms,
)
from composable_fsdp.checkpoint.options import Form
from composable_fsdp.testing import run_ranks
from tests.ranks._checkpoint_worlds import local
from tests.ranks._model_parallel import PAIRS, named_mesh, parallelize_pairs
from tests.ranks._models import seeded, shard_layers
from tests.ranks._sharding import exactly, expected_shard
from tests.ranks._state_dicts import Everything, build, same_values, scramble, shard, train, wholes_of
from tests.ranks.test_parameter_meshes import MIXTURE, place_experts
from tests.transports import TRANSPORTS, Environment

FORMS: tuple[Form, ...] = (
    Sharded(),
    Sharded(offload_to_cpu=True),
    Local(),
    Local(offload_to_cpu=True),
    Full(),
    Full(offload_to_cpu=True),
    Full(rank0_only=True),
    Full(rank0_only=True, offload_to_cpu=True),
)
BF16: dict[str, Any] = {
    "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32),
}
OFFLOAD: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}


SAFE: list[Any] = [DTensor, DeviceMesh, DTensorSpec, TensorMeta, Shard, Replicate]
"""What sharded values are made of, for ``torch.load(..., weights_only=True)``."""

COUNT = "norm.num_batches_tracked"
"""Not missing in a state dict of no version: ``nn.BatchNorm1d`` adds it then."""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def message(call: Callable[[], object], kind: type[Exception] = CheckpointError) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def names() -> None:
    expected: Any = build().state_dict()
    for wrap in ("", "before", "after", "compiled"):
        model = shard(build(), wrap=wrap)
        for form in FORMS:
            found: Any = state_dict(model, form)
            load_state_dict(model, found, form)
            if not found:  # on rank 0 only
                continue
            assert list(found) == list(expected), (wrap, form)
            assert found["layers.1.weight"] is found["layers.2.weight"]
            assert found["again.weight"] is found["layers.0.weight"]
            assert found["layers.1._extra_state"] == {"calls": 0}
            assert set(found._metadata) == set(expected._metadata), (wrap, form)
        wrapped = {f"layers.3._orig_mod.{n}" for n in ("weight", "bias")}
        given = {n.replace("layers.3.", "layers.3._orig_mod."): v for n, v in build().state_dict().items()}
        assert wrapped < set(given)
        load_state_dict(model, given)


@pytest.mark.behaviour("F-01")
def test_names_are_those_of_the_unsharded_model() -> None:
    run_ranks(names, 2)


def assert_shown(model: nn.Module, expected: dict[str, Any], mesh: DeviceMesh) -> None:
    """Each form has the values ``expected``, this rank's part of them where it has parts."""
    axis = mesh.ndim - 1
    rank, ranks = mesh.get_local_rank(axis), mesh.size(axis)
    here = state_dict(model)
    for form in FORMS:
        found = state_dict(model, form)
        if isinstance(form, Full):
            shows = not form.rank0_only or dist.get_rank() == 0
            same_values(found, expected if shows else {})
            memory = {v.untyped_storage().data_ptr() for v in here.values() if type(v) is torch.Tensor}
            memory |= {v.to_local().untyped_storage().data_ptr() for v in here.values() if isinstance(v, DTensor)}
            own = {v.untyped_storage().data_ptr() for v in found.values() if isinstance(v, torch.Tensor)}
            assert not (own & memory) - {0}, f"{form} aliases the model"
            continue
        for name, value in expected.items():
            if not isinstance(value, torch.Tensor):
                assert found[name] == value
            elif isinstance(here[name], DTensor):
                part = expected_shard(value, rank, ranks)
                assert isinstance(found[name], DTensor) == isinstance(form, Sharded), name
                local = found[name].to_local() if isinstance(form, Sharded) else found[name]
                exactly(local, part, name)
                assert local.data_ptr() == here[name].to_local().data_ptr(), f"{name} is a copy"
            else:
                exactly(found[name], value, name)


def all_forms(shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape)
    for options in ({}, BF16, OFFLOAD, BF16 | OFFLOAD) if shape == (2,) else ({}, BF16 | OFFLOAD):
        model, reference = shard(build(), mesh, wrap="before", **options), build()
        fresh = shard(build(), mesh, wrap="after", **options)
        optimizer, other = sgd(model), sgd(reference)
        for steps in (0, 2):
            train(model, optimizer, range(steps))
            train(reference, other, range(steps))
            expected = wholes_of(model)
            rtol, atol = (0.1, 0.05) if "mp_policy" in options else (None, None)
            for name, value in reference.state_dict().items():
                if isinstance(value, torch.Tensor):
                    assert_close(expected[name], value, rtol=rtol, atol=atol, msg=partial("{}: {}".format, name))
            assert_shown(model, expected, mesh)
            for form in FORMS:
                found = copy.deepcopy(state_dict(model, form))
                assert not any(load_state_dict(scramble(fresh), found, form))
                same_values(wholes_of(fresh), expected)


@pytest.mark.behaviour("F-02", "F-03", "F-04", "F-13")
@pytest.mark.parametrize("shape", [(1,), (2,), (4,), (2, 2)], ids=str)
def test_every_form_has_the_trained_values_in_their_own_dtype_and_loads_back(shape: tuple[int, ...]) -> None:
    run_ranks(all_forms, prod(shape), shape)


def to_and_from_the_unsharded_model() -> None:
    model = shard(build(), wrap="before")
    optimizer = sgd(model)
    train(model, optimizer)
    expected = wholes_of(model)
    plain = build()
    plain.load_state_dict(state_dict(model, Full()))
    same_values(plain.state_dict(), expected)
    scramble(model)
    load_state_dict(model, plain.state_dict())
    same_values(wholes_of(model), expected)
    for form in (None, Full(), Local()):  # all of them whole tensors, where nothing is sharded
        other = build()
        load_state_dict(scramble(other), state_dict(plain, form or Sharded()), form)
        same_values(other.state_dict(), expected)
    other = build()
    load_state_dict(scramble(other), state_dict(model))
    same_values(other.state_dict(), expected)
    bf16 = {
        n: v.bfloat16() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for n, v in expected.items()
    }
    load_state_dict(model, bf16)
    exactly(wholes_of(model)["layers.3.weight"], bf16["layers.3.weight"].float(), "cast")


@pytest.mark.behaviour("F-04")
def test_full_dicts_go_to_and_from_the_unsharded_model() -> None:
    run_ranks(to_and_from_the_unsharded_model, 2)


def misfits() -> list[str]:
    model = shard(build(), wrap="before")
    before = wholes_of(model)
    full, local = state_dict(model, Full()), copy.deepcopy(state_dict(model, Local()))
    for given in (full, local):
        for value in given.values():
            if isinstance(value, torch.Tensor):
                value.add_(1)
    wrong = {**full, "layers.3.weight": torch.zeros(5, 8), "frozen": torch.zeros(3, dtype=torch.int64), "flag": 1.0}
    del wrong["table"]
    wrong["extra"] = torch.zeros(2)
    found = [
        message(lambda: load_state_dict(model, wrong)),
        message(lambda: load_state_dict(model, wrong, strict=False)),
    ]
    some = {n: v for n, v in full.items() if n != "layers.3.bias" or dist.get_rank() == 1}
    found += [message(partial(load_state_dict, model, some, strict=s)) for s in (True, False)]
    found.append(message(lambda: load_state_dict(model, local)))
    found.append(message(lambda: load_state_dict(model, full, Local())))
    found.append(message(lambda: load_state_dict(model, state_dict(model), Full())))
    found.append(message(lambda: load_state_dict(model, full, Sharded())))
    found.append(message(lambda: load_state_dict(model, [])))  # type: ignore[arg-type]
    found.append(message(lambda: load_state_dict(model, {"frozen": torch.zeros(3, device="meta")}, strict=False)))
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    for name, part, dim in (("frozen", torch.zeros(3 - 3 * rank), 0), ("layers.0.weight", torch.zeros(7, 5), 1)):
        shape = before[name].shape
        odd = DTensor.from_local(part, mesh, [Shard(dim)], run_check=False, shape=shape, stride=before[name].stride())
        found.append(message(partial(load_state_dict, model, {name: odd}, strict=False)))
    same_values(wholes_of(model), before)
    keys = load_state_dict(model, {"layers.3._orig_mod.bias": torch.zeros(5), "b.extra": torch.zeros(1)}, strict=False)
    assert keys.unexpected_keys == ["b.extra"]
    assert set(keys.missing_keys) == set(before) - {"layers.3.bias", COUNT}
    same_values(wholes_of(model), {**before, "layers.3.bias": torch.zeros(5)})
    found.append(message(lambda: load_state_dict(model, local, Local(), broadcast_from_rank0=True), ConfigurationError))
    return found


@pytest.mark.behaviour("F-04")
def test_what_does_not_fit_is_one_error_on_all_ranks_and_nothing_is_loaded() -> None:
    first, second = run_ranks(misfits, 2)
    assert first == second
    wrong, lax, some, some_lax, parts, whole_parts, sharded, plain, no_dict, meta, alike, other, contradiction = first
    assert wrong.splitlines() == [
        "the state dict does not fit FSDPEverything. Nothing was loaded.",
        "  missing (1):",
        "    table: int64 (4,)",
        "  unexpected (1):",
        "    extra: float32 (2,)",
        "  of another shape (1):",
        "    layers.3.weight: (5, 8), expected (5, 7)",
        "  of another dtype (1):",
        "    frozen: int64, expected float32",
        "  'flag' is no tensor but of type float",
    ]
    assert lax.splitlines() == [wrong.splitlines()[0], *wrong.splitlines()[5:]]
    assert "    layers.3.bias: float32 (5,) (on rank 0)" in some.splitlines()
    assert "    layers.3.bias: other ranks have it (on rank 0)" in some_lax.splitlines()
    assert "    layers.0.weight: (4, 5), expected (7, 5) (on rank 0)" in parts.splitlines()
    assert "    layers.0.weight: (7, 5), expected (4, 5) as this rank's part (on rank 0)" in whole_parts.splitlines()
    assert "'layers.0.weight' is a DTensor: pass form=Sharded() instead of Full()" in sharded
    assert "'layers.0.weight' is a plain tensor: pass form=Full() or Local() instead of Sharded()" in plain
    assert "'plain.weight'" not in plain
    assert "a state dict maps names to values, but a list was given" in no_dict
    assert "'frozen' is on the meta device and has no values" in meta
    assert "    frozen: a local part of (3,), expected (2,) (on rank 0)" in alike.splitlines()
    assert "    layers.0.weight: a local part of (7, 5), expected (7, 3) (on rank 0)" in other.splitlines()
    assert contradiction.startswith("broadcast_from_rank0 sends whole tensors, but form is Local(")


def kept_unsharded() -> None:
    model = shard(build(), reshard_after_forward=False).eval()
    x = torch.ones(2, 5)
    with torch.no_grad():
        model(x)  # leaves the groups unsharded
        values = {n: v * 2 if isinstance(v, torch.Tensor) else v for n, v in state_dict(model, Full()).items()}
        model(x)
        load_state_dict(model, values)
        plain = build().eval()
        plain.load_state_dict(values)
        assert_close(model(x), plain(x))


@pytest.mark.behaviour("F-04")
def test_what_was_left_unsharded_computes_with_the_loaded_values() -> None:
    run_ranks(kept_unsharded, 2)


class OneAtATime:
    """Stands in for a function that makes whole tensors, and checks that the last is gone when the next is made."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._last: Callable[[], object] = lambda: None
        self.calls = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        assert self._last() is None, f"a whole tensor is still there at call {self.calls} of rank {dist.get_rank()}"
        made = self._function(*args, **options)
        self.calls += 1
        self._last = ref(made)
        return made


def from_rank_0(shape: tuple[int, ...]) -> list[str]:
    mesh, patch, rank = init_device_mesh("cpu", shape), pytest.MonkeyPatch(), dist.get_rank()
    model = shard(build(), mesh)
    train(model, sgd(model))
    expected = wholes_of(model)
    spy = OneAtATime(tensor_forms.shown)
    with patch.context() as patches:
        if rank != 0:
            patches.setattr(forms, "shown", spy)
        full = state_dict(model, Full(rank0_only=True, offload_to_cpu=True))
    distinct = {id(v) for v in model.state_dict(keep_vars=True).values() if isinstance(v, torch.Tensor)}
    assert spy.calls == (len(distinct) if rank else 0)
    assert bool(full) == (rank == 0)
    others: Any = ({}, None, {"garbage": 1}, {})[rank]
    for options in ({"form": Full(rank0_only=True)}, {"broadcast_from_rank0": True}):
        fresh = scramble(shard(build(), mesh, wrap="after"))
        with patch.context() as patches:
            if rank != 0:
                patches.setattr(holders.Holders, "send", method(OneAtATime(holders.Holders.send)))
            load_state_dict(fresh, full or others, **options)
        same_values(wholes_of(fresh), expected)
        other = scramble(build())
        load_state_dict(other, full or others, broadcast_from_rank0=True)  # not sharded, on all ranks
        same_values(other.state_dict(), expected)
    wrong = {**full, "frozen": torch.zeros(4), "new": 1} if rank == 0 else others
    found = [message(lambda: load_state_dict(model, wrong, Full(rank0_only=True)))]
    found += [message(lambda: load_state_dict(model, full if rank else None, broadcast_from_rank0=True))]  # type: ignore[arg-type]
    same_values(wholes_of(model), expected)
    keys = load_state_dict(
        model, {"flag": torch.zeros(1), "new": 1} if rank == 0 else others, Full(rank0_only=True), strict=False
    )
    assert keys.unexpected_keys == ["new"]
    assert set(keys.missing_keys) == set(expected) - {"flag", COUNT}
    same_values(wholes_of(model), {**expected, "flag": torch.zeros(1)})
    return found


def method(spy: OneAtATime) -> Callable[..., Any]:
    return lambda *args: spy(*args)


@pytest.mark.behaviour("F-05")
@pytest.mark.parametrize("shape", [(1,), (2,), (2, 2)], ids=str)
def test_rank_0_alone_has_the_model_and_the_others_one_tensor_at_a_time(shape: tuple[int, ...]) -> None:
    texts = run_ranks(from_rank_0, prod(shape), shape)
    assert all(text == texts[0] for text in texts)
    wrong, no_dict = texts[0]
    where = " (on rank 0)" if prod(shape) > 1 else ""
    assert f"    frozen: (4,), expected (3,){where}" in wrong.splitlines()
    assert f"    new: int{where}" in wrong.splitlines()
    assert f"  a state dict maps names to values, but a NoneType was given{where}" in no_dict.splitlines()


def on_meta() -> str:
    with torch.device("meta"):
        model = shard(Everything())
    full = build().state_dict()
    found = message(lambda: load_state_dict(model, full))
    assert message(lambda: state_dict(model, Full())).startswith("FSDPEverything has no full state dict: these are on")
    with pytest.warns(UserWarning, match="scratch"):
        to_empty(model, device="cpu")
    load_state_dict(model, full)
    same_values(state_dict(model, Full()), full)
    return found


@pytest.mark.behaviour("F-04")
def test_parameters_on_meta_are_refused_and_to_empty_is_named() -> None:
    first, second = run_ranks(on_meta, 2)
    assert first == second
    assert "these are on the meta device and have no memory: flag, frozen, table, layers.0.weight," in first
    assert first.endswith("Call composable_fsdp.to_empty(model, device=...) first.")


def other_placements() -> None:
    model = shard(build(), init_device_mesh("cpu", (4,)))
    train(model, sgd(model))
    expected = wholes_of(model)
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    target = scramble(shard(build(), hybrid))
    load_state_dict(target, state_dict(model))
    same_values(wholes_of(target), expected)
    load_state_dict(scramble(model), state_dict(target, Sharded(offload_to_cpu=True)))
    same_values(wholes_of(model), expected)
    for placements in ((Replicate(), Shard(0)), (Shard(0), Shard(0)), (Replicate(), Replicate())):
        mixed = {
            name: distribute_tensor(value, hybrid, placements)
            if isinstance(value, torch.Tensor) and value.ndim
            else value
            for name, value in expected.items()
        }
        load_state_dict(scramble(model), mixed)
        same_values(wholes_of(model), expected)
    same_ranks = DeviceMesh("cpu", [0, 1, 2, 3])
    load_state_dict(model, state_dict(scramble(shard(build(), same_ranks))))
    assert float(wholes_of(model)["flag"]) == 9


@pytest.mark.behaviour("F-04", "F-06")
def test_sharded_values_may_lie_on_other_meshes_in_other_placements() -> None:
    run_ranks(other_placements, 4)


def uneven_tensor_parallel() -> None:
    mesh = named_mesh(dp=2, tp=2)

    def parallel() -> nn.Module:
        model = PAIRS.build()
        parallelize_pairs(model, mesh["tp"])
        for layer in model.get_submodule("layers").children():
            fully_shard(layer, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])

    expected = PAIRS.build().state_dict()
    for form in FORMS:
        found = copy.deepcopy(state_dict(parallel(), form))
        if isinstance(form, Full):
            same_values(found, expected if not form.rank0_only or dist.get_rank() == 0 else {})
        fresh = scramble(parallel())
        load_state_dict(fresh, found, form)
        same_values(wholes_of(fresh), expected)


@pytest.mark.behaviour("F-02", "F-04")
def test_uneven_tensor_parallel_shards_in_every_form() -> None:
    run_ranks(uneven_tensor_parallel, 4)


class ExpertOnEachRank(nn.Module):
    """A layer that all ranks have, and an expert of which every second rank has another one."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.dense = nn.Linear(3, 3)
        self.expert = nn.Linear(3, 3)
        nn.init.constant_(self.dense.weight, 5)
        nn.init.constant_(self.expert.weight, index)


def experts() -> None:
    mesh = named_mesh(edp=2, ep=2)
    data, index, rank = mesh["edp", "ep"]._flatten("dp"), mesh.get_local_rank("ep"), dist.get_rank()

    def mixture() -> nn.Module:
        model = MIXTURE.build()
        placed = place_experts(model, mesh["ep"])
        apart = ShardPlacementResult(None, mesh["edp"])
        return shard_layers(model, fully_shard, mesh=data, shard_placement_fn=lambda p: apart if p in placed else None)

    def plain_experts() -> nn.Module:
        model = seeded(ExpertOnEachRank, index=index)()
        own, apart = set(model.get_submodule("expert").parameters()), ShardPlacementResult(None, mesh["edp"])
        return fully_shard(model, mesh=data, shard_placement_fn=lambda p: apart if p in own else None)

    distinct = seeded(ExpertOnEachRank, index=index)().state_dict()
    own = {name: value for name, value in distinct.items() if "expert" in name}
    for make, expected, here in (
        (mixture, MIXTURE.build().state_dict(), {}),
        (plain_experts, distinct, own if rank == 1 else {}),
    ):
        for form in FORMS:
            found = copy.deepcopy(state_dict(make(), form))
            if isinstance(form, Full):
                same_values(found, expected if rank == 0 or not form.rank0_only else here)
            fresh = scramble(make())
            load_state_dict(fresh, found, form)
            same_values(wholes_of(fresh), expected)


@pytest.mark.behaviour("F-02", "F-04", "F-05")
def test_experts_have_a_first_rank_of_their_own_where_others_have_others() -> None:
    run_ranks(experts, 4)


def saved_to_disk() -> None:
    model = shard(build())
    train(model, sgd(model))
    expected = wholes_of(model)
    for form in FORMS:
        file = io.BytesIO()
        torch.save(state_dict(model, form), file)
        file.seek(0)
        with torch.serialization.safe_globals(SAFE):
            found = torch.load(file, weights_only=True)
        fresh = scramble(shard(build()))
        load_state_dict(fresh, found, form)
        same_values(wholes_of(fresh), expected)


@pytest.mark.behaviour("F-08")
def test_every_form_is_saved_and_loaded_by_torch() -> None:
    run_ranks(saved_to_disk, 2)


def copied_state() -> None:
    """As averages of weights and best checkpoints do it, also of what was made on meta."""
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    with torch.device("meta"):
        model = shard(Everything(), mesh)
    with pytest.warns(UserWarning, match="scratch"):
        to_empty(model, device="cpu")
    model.load_state_dict(shard(build(), mesh).state_dict())
    for trained in (model, shard(build(), mesh, wrap="before", reshard_after_forward=False)):
        holder = nn.Sequential(trained)
        before = wholes_of(holder)
        best = copy.deepcopy(holder.state_dict())
        train(trained, sgd(trained))
        assert not any(torch.equal(v, before[n]) for n, v in wholes_of(holder).items() if n.endswith("flag"))
        parameters = holder.state_dict(keep_vars=True)
        assert {id(p) for p in holder.parameters()} <= {id(value) for value in parameters.values()}
        for name, value in holder.state_dict().items():
            if isinstance(value, DTensor):
                parameter = parameters[name]
                assert not value.requires_grad
                assert value.placements == parameter.placements
                assert local(value).data_ptr() == local(parameter).data_ptr(), name
                assert local(value).shape == local(parameter).shape, f"{name} on rank {rank}"
        holder.load_state_dict(best)
        same_values(wholes_of(holder), before)


@pytest.mark.behaviour("F-02")
@pytest.mark.parametrize("transport", TRANSPORTS.values(), ids=TRANSPORTS)
def test_the_models_own_state_dict_can_be_copied_and_aliases_the_parameters(transport: Environment) -> None:
    run_ranks(copied_state, 2, environment=transport)


def chosen_forms() -> str:
    model = shard(build(), wrap="before")
    expected, outside = wholes_of(model), set(vars(model))
    with state_dict_form(model, Full()):
        same_values(model.state_dict(), expected)
        with state_dict_form(model, Local()):
            local = copy.deepcopy(model.state_dict())
            assert local["layers.0.weight"].shape == (4 if dist.get_rank() == 0 else 3, 5)
            scramble(model).load_state_dict(local)
            same_values(wholes_of(model), expected)
        same_values(model.state_dict(), expected)
        assert model.state_dict(keep_vars=True)["flag"] is model.flag
        holder = nn.Sequential(model)
        same_values(holder.state_dict(), {f"0.{name}": value for name, value in expected.items()})
        scramble(model).load_state_dict(expected)
        keys = model.load_state_dict({}, strict=False)
        assert set(keys.missing_keys) == set(expected) - {COUNT}
        assigned = message(lambda: model.load_state_dict(expected, assign=True), ConfigurationError)
    wrapper: Any = checkpoint_wrapper(model)
    with state_dict_form(wrapper, Full()):
        same_values(wrapper.state_dict(), expected)
        scramble(model)
        wrapper.load_state_dict(expected)
    same_values(wholes_of(model), expected)
    with pytest.raises(KeyError, match="from the body"), state_dict_form(model, Full(rank0_only=True)):
        model.state_dict().pop("from the body")
    assert set(vars(model)) == outside
    assert isinstance(model.state_dict()["flag"], DTensor)
    return assigned


@pytest.mark.behaviour("F-10")
def test_a_context_chooses_the_form_of_the_models_own_methods() -> None:
    assert all("cannot assign=True" in text for text in run_ranks(chosen_forms, 2))


class Noted(nn.Linear):
    """Notes what its load hooks see. Its extra state is a tensor that grows."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.seen: list[Any] = []
        self.extra = torch.zeros(1)
        self.register_load_state_dict_pre_hook(lambda module, state, prefix, *_: self.seen.append(sorted(state)))
        self.register_load_state_dict_post_hook(lambda module, keys: self.seen.append(list(keys.missing_keys)))

    def get_extra_state(self) -> torch.Tensor:
        return self.extra

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra = state


def hooks_of_modules() -> None:
    for streams in (False, True):
        first = Noted()
        model = fully_shard(nn.Sequential(first, nn.Linear(3, 1)))
        values: dict[str, Any] = {name: torch.ones_like(v) for name, v in state_dict(model, Full()).items()}
        values["0._extra_state"] = torch.full((5,), 2.0)
        load_state_dict(model, {} if streams and dist.get_rank() else values, broadcast_from_rank0=streams)
        assert first.seen == [["0._extra_state", "0.bias", "0.weight"], []]
        exactly(first.extra, torch.full((5,), 2.0), "extra state")
        same_values(state_dict(model, Full()), values)


@pytest.mark.behaviour("F-04")
def test_load_hooks_of_modules_run_and_extra_state_is_set() -> None:
    run_ranks(hooks_of_modules, 2)
