"""``Muon`` and ``owner_step`` without other ranks: groups, matrices, errors, copies, plans of owners and exchanges."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing import assert_close

from composable_fsdp import Muon, owner_step
from composable_fsdp.errors import ArgumentTypeError, ConfigurationError, LifecycleError
from tests._internals import (
    Cut,
    OwnerPlans,
    Slot,
    StateForm,
    Tiling,
    Unit,
    assign_owners,
    axis_cuts,
    cut_buckets,
    data_parallel_placements,
    make_exchanges,
    message_limit,
    newton_schulz_cost,
    tiling_of,
)
from tests.helpers.sharding import fake_ranks


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    made = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return made


@pytest.mark.parametrize("options", [{}, {"lr": torch.tensor(0.02)}, {"nesterov": False, "adjust_lr_fn": "original"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_plain_parameters_get_the_bits_of_torch(dtype: torch.dtype, options: dict[str, Any]) -> None:
    for ours, theirs in steps_of_both(dtype, options):
        assert torch.equal(ours, theirs)


def test_parameters_in_bfloat16_differ_by_the_rounding_of_one_addition() -> None:
    for ours, theirs in steps_of_both(torch.bfloat16, {"lr": 0.02}):
        assert_close(ours, theirs)


def steps_of_both(dtype: torch.dtype, options: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs of parameters and of momentum after three steps of our Muon and of torch's."""
    ours, theirs = ([p.detach().to(dtype).requires_grad_() for p in parameters((9, 5), (4, 7))] for _ in range(2))
    optimizers = Muon(ours, bucket_bytes=100, **options), torch.optim.Muon(theirs, **options)
    for step in range(3):
        for of, optimizer in zip((ours, theirs), optimizers, strict=True):
            for p in of:
                p.grad = (p.detach() * (step + 1)).cos()
            optimizer.step()
    momentum = [(optimizers[0].state[a], optimizers[1].state[b]) for a, b in zip(ours, theirs, strict=True)]
    pairs = [(a.detach(), b.detach()) for a, b in zip(ours, theirs, strict=True)]
    return pairs + [(a["momentum_buffer"], b["momentum_buffer"]) for a, b in momentum]


def test_momentum_in_bfloat16_is_not_divided_by_its_norm() -> None:
    (p,) = parameters((6, 6))
    p.data, gradient = p.data.bfloat16(), p.grad.bfloat16()  # type: ignore[union-attr]
    p.grad = gradient
    optimizer = Muon([p], nesterov=False, momentum=0.0)
    optimizer.step()
    assert torch.equal(optimizer.state[p]["momentum_buffer"], gradient)


def test_groups_are_split_into_matrices_and_the_rest_with_the_settings_of_adamw() -> None:
    weight, bias, embedding = parameters((4, 4), (4,), (8, 4))
    optimizer = Muon(
        [
            {"params": [weight, bias], "eps": 1e-3, "momentum": 0.5, "weight_decay": 0.0},
            {"params": [embedding], "algorithm": "adamw", "lr": 3e-4, "betas": (0.8, 0.9)},
        ],
        lr=0.02,
    )
    found = [
        (group["algorithm"], group["lr"], group["weight_decay"], len(group["params"]))
        for group in optimizer.param_groups
    ]
    assert found == [("muon", 0.02, 0.0, 1), ("adamw", 0.02, 0.0, 1), ("adamw", 3e-4, 0.1, 1)]
    assert [group["eps"] for group in optimizer.param_groups] == [1e-3, 1e-8, 1e-8]
    expected = [p.detach().clone().requires_grad_() for p in (bias, embedding)]
    for p, own in zip(expected, (bias, embedding), strict=True):
        p.grad = own.grad.clone()  # type: ignore[union-attr]
    theirs = torch.optim.AdamW(
        [
            {"params": [expected[0]], "lr": 0.02, "weight_decay": 0.0},
            {"params": [expected[1]], "lr": 3e-4, "betas": (0.8, 0.9), "weight_decay": 0.1},
        ]
    )
    optimizer.step()
    theirs.step()
    assert torch.equal(bias, expected[0])
    assert torch.equal(embedding, expected[1])


def test_stacked_matrices_are_those_of_a_group_that_asks_for_muon() -> None:
    p, other = parameters((3, 6, 4), (3, 6, 4))
    parts = [nn.Parameter(each.detach().clone()) for each in p]
    for part, gradient in zip(parts, p.grad, strict=True):  # type: ignore[arg-type]
        part.grad = gradient.clone()
    optimizer = Muon([{"params": [("experts", p)], "algorithm": "muon"}, {"params": [("filters", other)]}])
    assert [group["algorithm"] for group in optimizer.param_groups] == ["muon", "adamw"]
    optimizer.step()
    torch.optim.Muon(parts).step()
    assert torch.equal(p, torch.stack(list[torch.Tensor](parts)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"Learning rate should be >= 0 but is: -1\.0"),
        ({"adjust_lr_fn": "rms"}, r"Adjust learning rate function rms is not supported"),
        ({"bucket_bytes": 0}, r"bucket_bytes must be positive, not 0"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon(parameters((2, 2)), **options)


def test_other_mistakes_are_named() -> None:
    text = r"^params must be a list: the order of a set differs from rank to rank"
    with pytest.raises(ArgumentTypeError, match=text):
        Muon([{"params": set(parameters((2, 2)))}])
    with pytest.raises(ConfigurationError, match=r"^Muon has no matrices= in this version: make each matrix a param"):
        Muon(parameters((2, 2)), matrices=lambda name, p: True)  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError, match=r"algorithm must be 'muon' or 'adamw', not 'sgd'"):
        Muon([{"params": parameters((2, 2)), "algorithm": "sgd"}])
    with pytest.raises(TypeError, match=r"optimizer can only optimize Tensors, but one of the params is .*int"):
        Muon([1])
    p = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    with pytest.raises(ConfigurationError, match=r"Muon takes no complex parameters"):
        Muon([p]).step()


@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.AdamW])
def test_state_dicts_of_torchs_optimizers_are_loaded(kind: Any) -> None:
    theirs, ours = parameters((4, 4)), parameters((4, 4))
    other = kind(theirs, lr=0.1)
    other.step()
    with torch.no_grad():
        ours[0].copy_(theirs[0])
    optimizer = Muon([{"params": ours, "algorithm": "muon" if kind is torch.optim.Muon else "adamw"}], lr=0.1)
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    for each in (other, optimizer):
        each.step()
    assert torch.equal(ours[0], theirs[0])


def test_copies_and_pickles_step_alike() -> None:
    optimizer = Muon(parameters((4, 4), (3,)), lr=0.1)
    optimizer.step()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        for group in (*other.param_groups,):
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        other.step()
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()
    for mine, its in zip(optimizer.param_groups, other.param_groups, strict=True):
        assert torch.equal(mine["params"][0], its["params"][0])


def test_a_closure_runs_with_gradients_and_its_loss_is_returned() -> None:
    (p,) = parameters((3, 3))
    optimizer = Muon([p])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    expected = p.detach().square().sum()
    assert torch.equal(optimizer.step(closure), expected)


def test_a_stack_of_no_matrices_is_stepped() -> None:
    (stack,) = parameters((0, 4, 4))
    Muon([{"params": [stack], "algorithm": "muon"}]).step()


def test_the_form_of_state_does_not_depend_on_devices() -> None:
    """Owners compute offloaded state on the device of the mesh: another form would be sent again in each step."""
    on_host, on_device = ({"mean": torch.zeros(3, device=each)} for each in ("cpu", "meta"))
    assert StateForm.of(on_host) == StateForm.of(on_device)


def test_owner_step_refuses_what_it_cannot_wrap() -> None:
    with pytest.raises(ArgumentTypeError, match=r"owner_step takes an optimizer, like torch\.optim\.Adafactor"):
        owner_step(3)  # type: ignore[type-var]
    optimizer = owner_step(torch.optim.Adafactor(parameters((3, 3))))
    with pytest.raises(ConfigurationError, match=r"the step of this Adafactor has been replaced already"):
        owner_step(optimizer)
    with pytest.raises(ConfigurationError, match=r"bucket_bytes must be positive, not -1"):
        owner_step(torch.optim.Adafactor(parameters((3, 3))), bucket_bytes=-1)
    step = optimizer.step
    del optimizer
    gc.collect()
    with pytest.raises(LifecycleError, match=r"this step of Adafactor belongs to an object that is gone"):
        step()


def test_owner_step_updates_plain_parameters_as_before() -> None:
    ours, theirs = parameters((3, 3), (5,)), parameters((3, 3), (5,))
    optimizers = owner_step(torch.optim.Adafactor(ours)), torch.optim.Adafactor(theirs)
    for optimizer in optimizers:
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


LLAMA_70B = 80 * [*2 * [(8192, 8192)], *2 * [(1024, 8192)], *2 * [(28672, 8192)], (8192, 28672)]
"""The matrices of the layers of a Llama of 70 B parameters."""
COSTS = st.lists(st.floats(0.5, 100), min_size=1, max_size=40)


def loads(costs: Sequence[float], owners: list[int], ranks: int) -> list[float]:
    return [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks)]


def test_owners_of_a_70b_model_are_balanced_on_1024_ranks() -> None:
    costs = [newton_schulz_cost(*shape) for shape in LLAMA_70B]
    for replicas in (8, 16):  # hybrid sharding: replicas that do not share the work
        ranks = 1024 // replicas
        of_ranks = loads(costs, assign_owners(costs, ranks), ranks)
        assert max(of_ranks) <= 1.10 * sum(costs) / ranks
    # 560 matrices on 1,024 owners: no assignment of whole matrices is faster than the largest one.
    assert max(loads(costs, assign_owners(costs, 1024), 1024)) == max(costs)


@pytest.mark.parametrize("shape", [(8,), (2, 8)])
def test_matrices_that_exceed_bucket_bytes_are_computed_together(shape: tuple[int, ...]) -> None:
    """A bucket of one matrix would be computed by one rank, while all others wait."""
    with fake_ranks(prod(shape)):
        mesh = init_device_mesh("cpu", shape)
        placements = [*[Replicate()] * (len(shape) - 1), Shard(0)]
        parameters = [distribute_tensor(torch.zeros(64, 32), mesh, placements) for _ in range(8)]
        slot = Slot(tiling_of(parameters[0]), torch.bfloat16)
        ((exchange, _),) = make_exchanges(parameters, [[Unit((slot,), (slot,), 1.0)]] * 8, bucket_bytes=slot.nbytes)
        assert len(exchange.buckets) == 1
        assert sorted(exchange.owners) == [*range(8)]


def test_a_plan_is_made_once_and_keeps_its_parameters() -> None:
    """Otherwise another parameter could get the ``id`` of one that is gone, and its plan."""
    plans, calls, parameters = OwnerPlans(1), list[int](), [torch.zeros(4, 6)]
    alive = weakref.ref(parameters[0])

    def units() -> list[list[Unit]]:
        slot = Slot(tiling_of(parameters[0]), torch.bfloat16)
        calls.append(1)
        return [[Unit((slot,), (slot,), 1.0)]]

    for forms in ([], [], ["new state"], ["new state"]):
        plans.of(parameters, units, forms)
    assert len(calls) == 2
    parameters.clear()
    assert alive() is not None


@given(COSTS, st.integers(1, 9), st.integers(1, 300), st.data())
def test_buckets_hold_each_matrix_once_and_keep_the_limit(costs, ranks: int, bucket_bytes: int, data) -> None:
    sizes = data.draw(st.lists(st.integers(1, 50), min_size=len(costs), max_size=len(costs)))
    owners = assign_owners(costs, ranks)
    limit = message_limit(bucket_bytes, max(sizes))
    buckets = cut_buckets(costs, owners, sizes, limit)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(costs)))
    for bucket in buckets:
        assert max(loads(sizes, [owners[i] if i in bucket else -1 for i in range(len(costs))], ranks)) <= limit
    ends = [(min(costs[i] for i in a), max(costs[i] for i in b)) for a, b in pairwise(buckets)]
    assert all(last >= first for last, first in ends)


@given(st.integers(0, 11), st.integers(0, 7), st.integers(1, 4), st.integers(1, 3), st.data())
def test_boxes_of_all_ranks_tile_each_block_of_a_tensor(rows: int, columns: int, first: int, second: int, data) -> None:
    cuts = data.draw(
        st.sampled_from(
            [
                ((0, 0, 1),),
                ((0, 0, 1), (1, 1, 1)),
                ((1, 0, 1), (0, 0, 1)),
                ((0, 0, 2), (1, 0, 1)),
                ((1, 1, 1),),
            ]
        )
    )
    sizes = first, second
    tiling = Tiling((rows, columns), tuple((axis, Cut(dim, sizes[axis], 0, blocks)) for axis, dim, blocks in cuts))
    top, left = data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns))
    height, width = data.draw(st.integers(0, rows - top)), data.draw(st.integers(0, columns - left))
    slot = Slot(tiling, torch.float32, (top, left), (height, width))
    whole = torch.arange(rows * columns).view(rows, columns)
    found = torch.full((height, width), -1)
    owner = (first - 1, second - 1)
    for coordinate in ((i, j) for i in range(first) for j in range(second)):
        part = tiling.extent(coordinate).take(whole)
        if slot.comes_from(coordinate, owner):
            for box in slot.boxes(coordinate):
                assert (found[box.slices] == -1).all()
                found[box.slices] = box.of_part(part)
    assert torch.equal(found, whole[top : top + height, left : left + width])


@given(st.integers(0, 40), st.integers(1, 5), st.integers(2, 4))
def test_rows_of_tensor_parallel_parameters_are_those_that_fully_shard_leaves(rows, data: int, tensor: int) -> None:
    placements = data_parallel_placements(1, 0, [Shard(0)], [tensor])
    tiling = Tiling((rows,), axis_cuts(placements, (data, tensor), is_parameter=True))
    for i in range(data):
        for j in range(tensor):
            whole = torch.arange(rows)
            for rank, ranks in ((j, tensor), (i, data)):
                whole = dict(enumerate(whole.chunk(ranks))).get(rank, whole[:0])
            assert torch.equal(tiling.extent((i, j)).take(torch.arange(rows)), whole)
