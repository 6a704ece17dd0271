"""Test that optimizers of whole parameters give the bits of the unsharded model by ``owner_step``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from composable_fsdp import fully_shard, owner_step
from tests.helpers.model_parallel import PAIRS, named_mesh, sharded_pairs
from tests.helpers.models import TASKS
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.sharding import assert_exact, full_value


class Soap(Optimizer):
    """A small SOAP (Vyas et al. 2024): Adam in the eigenbasis of Shampoo's statistics, which changes every 2 steps."""

    def __init__(self, params: Any, lr: float = 3e-3) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                self._update(p, self.state[p], group["lr"])

    def _update(self, p: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        gradient = p.grad
        assert gradient is not None
        if not state:
            state |= {"step": 0, "mean": torch.zeros_like(p), "square": torch.zeros_like(p), "basis": None}
            state["statistics"] = [torch.zeros(n, n) for n in p.shape] if p.ndim == 2 else []
        state["step"] += 1
        state["mean"].lerp_(gradient, 0.1)
        mean = state["mean"]
        left = right = torch.empty(0)
        if p.ndim == 2:
            for matrix, new in zip(state["statistics"], (gradient @ gradient.T, gradient.T @ gradient), strict=True):
                matrix.lerp_(new, 0.1)
            if state["basis"] is None or state["step"] % 2 == 0:
                state["basis"] = [torch.linalg.eigh(matrix)[1].contiguous() for matrix in state["statistics"]]
            left, right = state["basis"]
            gradient, mean = left.T @ gradient @ right, left.T @ mean @ right
        state["square"].mul_(0.9).addcmul_(gradient, gradient, value=0.1)
        update = mean / (state["square"].sqrt() + 1e-6)
        if p.ndim == 2:
            update = left @ update @ right.T
        p.sub_(update, alpha=lr)


MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "soap": Soap,
    "muon": lambda p: torch.optim.Muon([each for each in p if each.ndim == 2], lr=0.02),
}


def packaged(name: str, **options: Any) -> Callable[[Any], Optimizer]:
    return lambda parameters: getattr(importlib.import_module("pytorch_optimizer"), name)(parameters, **options)


PACKAGED = {"SOAP": packaged("SOAP", precondition_frequency=2), "Shampoo": packaged("Shampoo", momentum=0.9)}


def compare_steps(
    model: nn.Module,
    reference: nn.Module,
    name: str,
    loss: Callable[[nn.Module, int], Any],
    steps: int = 3,
    check: Callable[[torch.Tensor, torch.Tensor, str], None] = assert_exact,
) -> list[int]:
    """Step both with the same gradients, and return the number of all-to-alls of each step."""
    make = (MAKERS | PACKAGED)[name]
    ours = owner_step(make(model.parameters()), bucket_bytes=1 << 13)
    theirs = make(reference.parameters())
    calls, original = [0] * steps, dist.all_to_all_single
    for step in range(steps):
        loss(model, step).backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            q.grad = None if p.grad is None else full_value(p.grad)

        def counting(*args: Any, step: int = step, **options: Any) -> Any:
            calls[step] += 1
            return original(*args, **options)

        with mock.patch.object(dist, "all_to_all_single", counting):
            ours.step()
        theirs.step()
        ours.zero_grad()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            check(full_value(p), q.detach(), f"{name}, step {step}")
            states = [pytree.tree_leaves(dict(o.state.get(t, {}))) for o, t in ((ours, p), (theirs, q))]
            for value, expected in zip(*states, strict=True):
                if isinstance(expected, torch.Tensor):
                    check(full_value(value), expected, f"{name}, step {step}, state")
                    assert isinstance(value, DTensor) == (expected.ndim > 0)
                else:
                    assert value == expected
                    assert type(value) is type(expected)
    settings = [{k: v for k, v in o.param_groups[0].items() if k != "params"} for o in (ours, theirs)]
    assert settings[0] == settings[1]
    return calls


def step_sharded(shape: tuple[int, ...], name: str) -> None:
    task = TASKS["mlp"]
    model, reference = task.build(), task.build()
    fully_shard(model, mesh=init_device_mesh("cpu", shape))
    calls = compare_steps(model, reference, name, lambda m, step: task.loss(m, task.batch_of(step, dist.get_rank())))
    assert calls[0] >= calls[1] == calls[2]


@pytest.mark.behaviour("C-01", "C-02")
@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=str)
def test_whole_parameter_optimizers_give_the_bits_of_the_unsharded_model(shape: tuple[int, ...]) -> None:
    for name in MAKERS:
        run_ranks(step_sharded, torch.Size(shape).numel(), shape, name)


@pytest.mark.behaviour("C-02")
@on_ranks(4)
def test_tensor_parallel_parameters() -> None:
    mesh = named_mesh(dp=2, tp=2)
    model = sharded_pairs(mesh)
    rank = mesh.get_local_rank("dp")
    for name in ("adafactor", "soap"):
        reference = PAIRS.build()
        with torch.no_grad():
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                q.copy_(full_value(p))
        compare_steps(model, reference, name, lambda m, step: PAIRS.loss(m, PAIRS.batch_of(step, rank)))


def assert_close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(found, expected, msg=lambda text: f"{what}: {text}")


def step_packaged(name: str) -> None:
    task = TASKS["mlp"]
    model, reference = task.build().double(), task.build().double()
    fully_shard(model)

    def loss(module: nn.Module, step: int) -> torch.Tensor:
        x, target = (each.double() for each in task.batch_of(step, dist.get_rank()))
        out: torch.Tensor = module(x) - target
        return out.square().mean()

    calls = compare_steps(model, reference, name, loss, 6, assert_close)
    assert calls[2] == calls[5] <= calls[0]


@pytest.mark.behaviour("C-01")
@pytest.mark.parametrize("name", PACKAGED)
def test_optimizers_of_a_package_differ_by_the_rounding_of_products_with_eigenvectors(name: str) -> None:
    """LAPACK returns eigenvectors transposed in memory. Sent, they are contiguous, so that products round otherwise.

    Power iterations amplify it, here several thousand times. So the model is in float64, in which it is below 1e-7.
    """
    pytest.importorskip("pytorch_optimizer", reason="needs pytorch_optimizer: make install")
    run_ranks(step_packaged, 2, name)
