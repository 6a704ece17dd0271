"""Groups, matrices, errors and copies of ``Muon`` and ``owner_step``, on one rank and without one."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from composable_fsdp import Muon, owner_step
from composable_fsdp.errors import ArgumentTypeError, ConfigurationError, LifecycleError


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
        [{"params": [weight, bias]}, {"params": [embedding], "algorithm": "adamw", "lr": 3e-4}],
        lr=0.02,
        adamw={"betas": (0.8, 0.9), "weight_decay": 0.0},
    )
    found = [
        (group["algorithm"], group["lr"], group["weight_decay"], len(group["params"]))
        for group in optimizer.param_groups
    ]
    assert found == [("muon", 0.02, 0.1, 1), ("adamw", 0.02, 0.0, 1), ("adamw", 3e-4, 0.0, 1)]
    assert optimizer.param_groups[1]["betas"] == (0.8, 0.9)
    assert optimizer.param_groups[1]["eps"] == 1e-8
    assert "momentum" not in optimizer.param_groups[1]
    expected = [p.detach().clone().requires_grad_() for p in (bias, embedding)]
    for p, own in zip(expected, (bias, embedding), strict=True):
        p.grad = own.grad.clone()  # type: ignore[union-attr]
    theirs = torch.optim.AdamW(
        [{"params": [expected[0]], "lr": 0.02}, {"params": [expected[1]], "lr": 3e-4}],
        betas=(0.8, 0.9),
        weight_decay=0.0,
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
        ({"lr": -1.0}, r"lr must be at least 0, not -1\.0"),
        ({"lr": torch.ones(2)}, r"lr must be one number, not a tensor of shape \(2,\)"),
        ({"momentum": -0.1}, r"momentum must be at least 0"),
        ({"weight_decay": -0.1}, r"weight_decay must be at least 0"),
        ({"adjust_lr_fn": "rms"}, r"adjust_lr_fn must be one of .*'match_rms_adamw'.* not 'rms'"),
        ({"ns_steps": 100}, r"ns_steps must be from 0 to 99, not 100"),
        ({"ns_coefficients": (1.0, 2.0)}, r"ns_coefficients must be three numbers"),
        ({"bucket_bytes": 0}, r"bucket_bytes must be positive, not 0"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Muon(parameters((2, 2)), **options)


def test_other_mistakes_are_named() -> None:
    text = r"^params must be a list: the order of a set differs from rank to rank"
    with pytest.raises(ArgumentTypeError, match=text):
        Muon([{"params": set(parameters((2, 2)))}])
    with pytest.raises(ConfigurationError, match=r"^Muon has no matrices= in this version\. Make each matrix a param"):
        Muon(parameters((2, 2)), matrices=lambda name, p: True)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"algorithm must be 'muon' or 'adamw', not 'sgd'"):
        Muon([{"params": parameters((2, 2)), "algorithm": "sgd"}])
    with pytest.raises(TypeError, match=r"optimizer can only optimize Tensors, but one of the params is .*int"):
        Muon([1])
    p = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    with pytest.raises(ConfigurationError, match=r"Muon takes no complex parameters"):
        Muon([p]).step()


def test_options_of_adamw_come_before_those_of_a_group_of_matrices() -> None:
    weight, bias = parameters((4, 4), (4,))
    group = {"params": [weight, bias], "lr": 0.02, "weight_decay": 0.3, "eps": 1e-3}
    matrices, others = Muon([group], adamw={"lr": 3e-4, "weight_decay": 0.0}).param_groups
    assert (matrices["lr"], matrices["weight_decay"], matrices["eps"]) == (0.02, 0.3, 1e-3)
    assert (others["lr"], others["weight_decay"], others["eps"]) == (3e-4, 0.0, 1e-8)


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
