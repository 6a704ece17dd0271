"""The three forms of state dicts: names, values, saving and loading."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing import assert_close

from composable_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, to_empty
from composable_fsdp.checkpoint import Full, Local, Sharded, load_state_dict, state_dict
from tests._internals import OwnerRanks, to_form
from tests._internals import model as forms
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.sharding import assert_exact, expected_shard
from tests.helpers.state_dicts import (
    COUNT,
    FORMS,
    SAFE,
    Everything,
    build,
    full_state_of,
    message,
    same_values,
    scramble,
    sgd,
    shard,
    train,
)

BF16: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)}
OFFLOAD: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}


@pytest.mark.behaviour("F-01")
@on_ranks(2)
def test_names_are_those_of_the_unsharded_model() -> None:
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


def assert_shown(model: nn.Module, expected: dict[str, Any], mesh: DeviceMesh) -> None:
    """Check that each form has the values ``expected``, or this rank's shards of them."""
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
                assert_exact(local, part, name)
                assert local.data_ptr() == here[name].to_local().data_ptr(), f"{name} must not be a copy"
            else:
                assert_exact(found[name], value, name)


@pytest.mark.behaviour("F-02", "F-03", "F-04", "F-13")
@pytest.mark.parametrize("shape", [(1,), (2,), (2, 2)], ids=str)
@on_ranks("shape")
def test_every_form_has_the_trained_values_in_their_own_dtype_and_loads_back(shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape)
    for options in ({}, BF16, OFFLOAD, BF16 | OFFLOAD) if shape == (2,) else ({}, BF16 | OFFLOAD):
        model, reference = shard(build(), mesh, wrap="before", **options), build()
        fresh = shard(build(), mesh, wrap="after", **options)
        optimizer, other = sgd(model), sgd(reference)
        for steps in (0, 2):
            train(model, optimizer, range(steps))
            train(reference, other, range(steps))
            expected = full_state_of(model)
            rtol, atol = (0.1, 0.05) if "mp_policy" in options else (None, None)
            for name, value in reference.state_dict().items():
                if isinstance(value, torch.Tensor):
                    assert_close(expected[name], value, rtol=rtol, atol=atol, msg=partial("{}: {}".format, name))
            assert_shown(model, expected, mesh)
            for form in FORMS:
                found = copy.deepcopy(state_dict(model, form))
                assert not any(load_state_dict(scramble(fresh), found, form))
                same_values(full_state_of(fresh), expected)


@pytest.mark.behaviour("F-04")
@on_ranks(2)
def test_full_state_dicts_are_interchangeable_with_the_unsharded_model() -> None:
    model = shard(build(), wrap="before")
    optimizer = sgd(model)
    train(model, optimizer)
    expected = full_state_of(model)
    plain = build()
    plain.load_state_dict(state_dict(model, Full()))
    same_values(plain.state_dict(), expected)
    scramble(model)
    load_state_dict(model, plain.state_dict())
    same_values(full_state_of(model), expected)
    for form in (None, Full(), Local()):  # all of them full tensors if nothing is sharded
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
    assert_exact(full_state_of(model)["layers.3.weight"], bf16["layers.3.weight"].float(), "cast")


def mismatches() -> list[str]:
    model = shard(build(), wrap="before")
    before = full_state_of(model)
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
    same_values(full_state_of(model), before)
    keys = load_state_dict(model, {"layers.3._orig_mod.bias": torch.zeros(5), "b.extra": torch.zeros(1)}, strict=False)
    assert keys.unexpected_keys == ["b.extra"]
    assert set(keys.missing_keys) == set(before) - {"layers.3.bias", COUNT}
    same_values(full_state_of(model), {**before, "layers.3.bias": torch.zeros(5)})
    return found


@pytest.mark.behaviour("F-04")
def test_mismatches_are_one_error_on_all_ranks_and_nothing_is_loaded() -> None:
    first, second = run_ranks(mismatches, 2)
    assert first == second
    wrong, lax, some, some_lax, shards, uncut, sharded, plain, no_dict, meta, lengths, other = first
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
    assert "    layers.0.weight: (4, 5), expected (7, 5) (on rank 0)" in shards.splitlines()
    assert "    layers.0.weight: (7, 5), expected (4, 5) as this rank's part (on rank 0)" in uncut.splitlines()
    assert "'layers.0.weight' is a DTensor: pass form=Sharded() instead of Full()" in sharded
    assert "'layers.0.weight' is a plain tensor: pass form=Full() or Local() instead of Sharded()" in plain
    assert "'plain.weight'" not in plain
    assert "a state dict maps names to values, but a list was given" in no_dict
    assert "'frozen' is on the meta device and has no values" in meta
    assert "    frozen: a local part of (3,), expected (2,) (on rank 0)" in lengths.splitlines()
    assert "    layers.0.weight: a local part of (7, 5), expected (7, 3) (on rank 0)" in other.splitlines()


@pytest.mark.behaviour("F-04")
@on_ranks(2)
def test_parameters_kept_unsharded_compute_with_the_loaded_values() -> None:
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


class OneAtATime:
    """Replaces a function that makes full tensors, and checks that the last one is freed before the next is made."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._last: Callable[[], object] = lambda: None
        self.calls = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        assert self._last() is None, f"a full tensor is still in memory at call {self.calls} of rank {dist.get_rank()}"
        made = self._function(*args, **options)
        self.calls += 1
        self._last = ref(made) if made.ndim else lambda: None  # scalars come with the state dict
        return made


def from_rank_0(shape: tuple[int, ...]) -> list[str]:
    mesh, patch, rank = init_device_mesh("cpu", shape), pytest.MonkeyPatch(), dist.get_rank()
    model = shard(build(), mesh)
    train(model, sgd(model))
    expected = full_state_of(model)
    spy = OneAtATime(to_form)
    with patch.context() as patches:
        if rank != 0:
            patches.setattr(forms, "to_form", spy)
        full = state_dict(model, Full(rank0_only=True, offload_to_cpu=True))
    distinct = {id(v) for v in model.state_dict(keep_vars=True).values() if isinstance(v, torch.Tensor)}
    assert spy.calls == (len(distinct) if rank else 0)
    assert bool(full) == (rank == 0)
    others: Any = ({}, None, {"garbage": 1}, {})[rank]
    for options in ({"form": Full(rank0_only=True)}, {"broadcast_from_rank0": True}):
        fresh = scramble(shard(build(), mesh, wrap="after"))
        with patch.context() as patches:
            if rank != 0:
                patches.setattr(OwnerRanks, "send", method(OneAtATime(OwnerRanks.send)))
            load_state_dict(fresh, full or others, **options)
        same_values(full_state_of(fresh), expected)
        other = scramble(build())
        # Not sharded, on all ranks, of a mapping that cannot be pickled.
        load_state_dict(other, MappingProxyType(full), broadcast_from_rank0=True)
        same_values(other.state_dict(), expected)
    wrong = {**full, "frozen": torch.zeros(4), "new": 1} if rank == 0 else others
    found = [message(lambda: load_state_dict(model, wrong, Full(rank0_only=True)))]
    found += [message(lambda: load_state_dict(model, full if rank else None, broadcast_from_rank0=True))]  # type: ignore[arg-type]
    same_values(full_state_of(model), expected)
    keys = load_state_dict(
        model, {"flag": torch.zeros(1), "new": 1} if rank == 0 else others, Full(rank0_only=True), strict=False
    )
    assert keys.unexpected_keys == ["new"]
    assert set(keys.missing_keys) == set(expected) - {"flag", COUNT}
    same_values(full_state_of(model), {**expected, "flag": torch.zeros(1)})
    return found


def method(spy: OneAtATime) -> Callable[..., Any]:
    return lambda *args: spy(*args)


@pytest.mark.behaviour("F-05")
@pytest.mark.parametrize("shape", [(1,), (2,), (2, 2)], ids=str)
def test_only_rank_0_has_the_model_and_others_one_tensor_at_a_time(shape: tuple[int, ...]) -> None:
    texts = run_ranks(from_rank_0, prod(shape), shape)
    assert all(text == texts[0] for text in texts)
    wrong, no_dict = texts[0]
    assert "    frozen: (4,), expected (3,)" in wrong.splitlines()
    assert "    new: int" in wrong.splitlines()
    assert "  a state dict maps names to values, but a NoneType was given" in no_dict.splitlines()


@pytest.mark.behaviour("F-04")
@on_ranks(2)
def test_parameters_on_meta_are_refused_and_to_empty_is_named() -> None:
    with torch.device("meta"):
        model = shard(Everything())
    full = build().state_dict()
    found = message(lambda: load_state_dict(model, full))
    assert message(lambda: state_dict(model, Full())).startswith("FSDPEverything has no full state dict: these are on")
    with pytest.warns(UserWarning, match="scratch"):
        to_empty(model, device="cpu")
    load_state_dict(model, full)
    same_values(state_dict(model, Full()), full)
    assert "these are on the meta device and have no memory: flag, frozen, table, layers.0.weight," in found
    assert found.endswith("Call composable_fsdp.to_empty(model, device=...) first.")


@pytest.mark.behaviour("F-08")
@on_ranks(2)
def test_every_form_is_saved_and_loaded_by_torch() -> None:
    model = shard(build())
    train(model, sgd(model))
    expected = full_state_of(model)
    for form in FORMS:
        file = io.BytesIO()
        torch.save(state_dict(model, form), file)
        file.seek(0)
        with torch.serialization.safe_globals(SAFE):
            found = torch.load(file, weights_only=True)
        fresh = scramble(shard(build()))
        load_state_dict(fresh, found, form)
        same_values(full_state_of(fresh), expected)
