"""Test the transforms of ``torch.func``, dual numbers and second derivatives, with losses that train the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from composable_fsdp import fully_shard
from composable_fsdp.trace import Recorder
from tests.helpers.assert_trace import ledger
from tests.helpers.forward_mode import load_forward_mode
from tests.helpers.run_ranks import on_ranks

WIDTH = 4

Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], Any]


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"product": torch.tanh(self.left(a)) * b, "sum": (self.right(a).sin() + b).view(*b.shape)}


class Net(nn.Module):
    """Ends in a linear module: the derivative of its output does not depend on the output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mix, self.last = nn.Linear(WIDTH, WIDTH), Mix(), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.mix(torch.tanh(self.first(x)), x)
        return self.last(mixed["product"] * mixed["sum"]) * self.scale


def energy(model: nn.Module) -> Callable[[torch.Tensor], Any]:
    return lambda x: model(x).square().sum()


def total(model: nn.Module) -> Callable[[torch.Tensor], Any]:
    return lambda x: model(x).sum()


def tangent_of_jvp(model: nn.Module, x: torch.Tensor, t: torch.Tensor) -> Any:
    return jvp(model, (x,), (t,))[1].square().mean()


def both_of_jvp(model: nn.Module, x: torch.Tensor, t: torch.Tensor) -> Any:
    out, slope = jvp(model, (x,), (t,))[:2]
    return (out - slope.detach()).square().mean() + (out * slope).mean()


def tangent_of_dual(model: nn.Module, x: torch.Tensor, t: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, t))).tangent.square().mean()


def both_of_dual(model: nn.Module, x: torch.Tensor, t: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(model(forward_ad.make_dual(x, t)))
        return (out.primal * out.tangent).mean()


def backward_inside_a_dual_level(model: nn.Module, x: torch.Tensor, t: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(model(forward_ad.make_dual(x, t)))
        loss = (out.primal.detach() * out.tangent).mean()
        loss.backward()
    return loss.detach()


def vjp_called_afterwards(model: nn.Module, x: torch.Tensor, t: torch.Tensor) -> Any:
    out, pull = vjp(model, x)[:2]
    return (pull(t)[0] * t).sum() + out.mean()


def second_derivative(of: Callable[[nn.Module], Any], model: nn.Module, x: torch.Tensor) -> Any:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(of(model)(x), x, create_graph=True)[0].square().mean()


def mean_square(loss: Callable[[nn.Module, torch.Tensor, torch.Tensor], Any]) -> Loss:
    return lambda model, x, t: loss(model, x, t).square().mean()


LOSSES: dict[str, Loss] = {
    "tangent of jvp": tangent_of_jvp,
    "both of jvp": both_of_jvp,
    "jvp of jvp": mean_square(lambda m, x, t: jvp(lambda x: jvp(m, (x,), (t,))[1], (x,), (t,))[1]),
    "tangent of dual": tangent_of_dual,
    "both of dual": both_of_dual,
    "backward inside a dual level": backward_inside_a_dual_level,
    "jacobian, forwards": mean_square(lambda m, x, t: jacfwd(m)(x[0]) @ t[0]),
    "jacobian, backwards": mean_square(lambda m, x, t: jacrev(m)(x[0]) @ t[0]),
    "jacobian, backwards in chunks": mean_square(lambda m, x, t: jacrev(m, chunk_size=1)(x[0]) @ t[0]),
    "samples": mean_square(lambda m, x, t: vmap(m)(x)),
    "samples of jvp": mean_square(lambda m, x, t: vmap(lambda x, t: jvp(m, (x,), (t,))[1])(x, t)),
    "samples of gradients": mean_square(lambda m, x, t: vmap(grad(energy(m)))(x)),
    "gradient": mean_square(lambda m, x, t: grad(energy(m))(x)),
    "gradient of the total": mean_square(lambda m, x, t: grad(total(m))(x)),
    "gradient of samples": mean_square(lambda m, x, t: grad(lambda x: vmap(m)(x).sum())(x)),
    "gradient of gradient": mean_square(lambda m, x, t: grad(lambda x: (grad(total(m))(x) * t).sum())(x)),
    "gradient of tangent": mean_square(lambda m, x, t: grad(lambda x: jvp(m, (x,), (t,))[1].sum())(x)),
    "tangent of gradient": mean_square(lambda m, x, t: jvp(grad(total(m)), (x,), (t,))[1]),
    "hessian of one sample": mean_square(lambda m, x, t: hessian(total(m))(x[0])),
    "vjp called afterwards": vjp_called_afterwards,
    "second derivative": lambda m, x, t: second_derivative(energy, m, x),
    "second derivative of the total": lambda m, x, t: second_derivative(total, m, x),
    "together with ordinary losses": lambda m, x, t: (
        tangent_of_jvp(m, x, t) + energy(m)(x) + grad(total(m))(t).square().mean() + energy(m)(t)
    ),
}


def inputs_of(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, t = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
    return x, t


def shard(model: nn.Module, *, groups: str, reshard: bool) -> nn.Module:
    if groups == "several":
        for part in model.children():
            fully_shard(part, reshard_after_forward=reshard)
    return fully_shard(model, reshard_after_forward=reshard)


def new_model() -> nn.Module:
    torch.manual_seed(3)
    return Net().double()


def check_same(what: str, actual: Any, expected: torch.Tensor | None) -> None:
    if actual is None or expected is None:
        assert actual is expected, what
        return
    actual = actual.full_tensor() if isinstance(actual, DTensor) else actual
    torch.testing.assert_close(actual, expected, msg=lambda text: f"{what}: {text}")


def backward(loss: torch.Tensor) -> None:
    if loss.requires_grad:
        loss.backward()


@pytest.mark.parametrize(
    ("transport", "groups", "reshard"),
    [
        ("sockets", "one", False),
        ("in common", "several", True),
    ],
)
@on_ranks(2, environment="transport")
def test_losses_in_transforms_train_like_the_unsharded_model(groups: str, reshard: bool) -> None:
    load_forward_mode()
    ranks = range(dist.get_world_size())
    for name_of_loss, loss_of in LOSSES.items():
        model, reference = shard(new_model(), groups=groups, reshard=reshard), new_model()
        with Recorder() as recorder:
            for step, needs_gradient in enumerate((False, True)):
                what = f"{name_of_loss}, inputs that need gradients: {needs_gradient}"
                own = [each.requires_grad_(needs_gradient) for each in inputs_of(step, dist.get_rank())]
                loss = loss_of(model, *own)
                backward(loss)
                for rank in ranks:
                    x, t = (each.requires_grad_(needs_gradient) for each in inputs_of(step, rank))
                    expected = loss_of(reference, x, t)
                    backward(expected)
                    if rank == dist.get_rank():
                        check_same(what, loss, expected)
                        for mine, same in zip(own, (x, t), strict=True):
                            check_same(f"{what}, gradient of the inputs", mine.grad, same.grad)
                for (name, parameter), same in zip(model.named_parameters(), reference.parameters(), strict=True):
                    mean = None if same.grad is None else same.grad / len(ranks)
                    check_same(f"{what}, {name}", parameter.grad, mean)
                model.zero_grad()
                reference.zero_grad()
        assert ledger(recorder) == {}, name_of_loss
