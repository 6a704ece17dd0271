"""Test inputs and outputs of modules: containers, views, views changed in place, returned inputs and weights.

Every inner module reshards after forward, so that a backward that is not detected finds no parameters in memory.
If ranks share parameters in memory, the parameters stay there.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from composable_fsdp import MixedPrecisionPolicy, fully_shard
from composable_fsdp.errors import ConfigurationError
from tests.helpers.models import seeded, shard_layers
from tests.helpers.rank_process import RanksError
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.training import check_parity
from tests.helpers.transports import COPIES

Pair = tuple[torch.Tensor, torch.Tensor]

WIDTH = 6


class Named(NamedTuple):
    a: torch.Tensor
    label: str
    b: torch.Tensor


Plain = namedtuple("Plain", ["a", "b"])


@dataclass
class Record:
    a: torch.Tensor
    rest: dict[str, Any]
    nothing: None = None


@dataclass(frozen=True)
class Frozen:
    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class Slotted:
    a: torch.Tensor
    b: torch.Tensor


class ModelOutput(OrderedDict):
    """A mapping of a user's class that nobody registered with pytree, like that of transformers in the past."""


class ReadOnly(Mapping):
    def __init__(self, **values: Any) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class ParamPlace:
    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a = a
        self.b = b


pytree.register_pytree_node(ParamPlace, lambda r: ([r.a, r.b], None), lambda children, _: ParamPlace(*children))

CONTAINERS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], Callable[[Any], Pair]]] = {
    "tuple": (lambda a, b: (a, b), lambda c: (c[0], c[1])),
    "list": (lambda a, b: [a, 3, b], lambda c: (c[0], c[2])),
    "dict": (lambda a, b: {"a": a, "b": b, "n": 1}, lambda c: (c["a"], c["b"])),
    "nested": (lambda a, b: {"x": [a, ({"y": b},)]}, lambda c: (c["x"][0], c["x"][1][0]["y"])),
    "namedtuple": (Plain, lambda c: (c.a, c.b)),
    "NamedTuple": (lambda a, b: Named(a, "label", b), lambda c: (c.a, c.b)),
    "dataclass": (lambda a, b: Record(a, {"b": [b]}), lambda c: (c.a, c.rest["b"][0])),
    "frozen dataclass": (Frozen, lambda c: (c.a, c.b)),
    "frozen dataclass with slots": (Slotted, lambda c: (c.a, c.b)),
    "dataclass in a tuple": (lambda a, b: (Frozen(a, b),), lambda c: (c[0].a, c[0].b)),
    "dict subclass": (lambda a, b: ModelOutput(a=a, b=b), lambda c: (c["a"], c["b"])),
    "UserDict": (lambda a, b: UserDict(a=a, b=b), lambda c: (c["a"], c["b"])),
    "registered": (ParamPlace, lambda c: (c.a, c.b)),
    "read-only mapping": (lambda a, b: ReadOnly(a=a, b=b), lambda c: (c["a"], c["b"])),
    "mapping proxy": (lambda a, b: MappingProxyType({"a": a, "b": b}), lambda c: (c["a"], c["b"])),
}


class Inner(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.pack, self.unpack = CONTAINERS[kind]
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Any, *, scale: Any) -> Any:
        a, b = self.unpack(inputs)
        factor = self.unpack(scale)[0]
        return self.pack(torch.tanh(self.first(a)) * factor, torch.tanh(self.second(b)) + a)


class Outer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Inner(kind), Inner(kind)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        inner: Any = self.layers[0]
        container = inner.pack(x, x * 2)
        for layer in self.layers:
            packed = layer(container, scale=inner.pack(x.sigmoid(), x))
            assert type(packed) is type(container)
            container = packed
        a, b = inner.unpack(container)
        return a + b


def inputs_of(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def play(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    loss: torch.Tensor = model(inputs_of(step, rank)).square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.behaviour("C-06")
@on_ranks(2, environment=COPIES)
def test_inputs_and_outputs_in_containers_train() -> None:
    for kind in CONTAINERS:
        check_parity(seeded(Outer, kind=kind), play, what=kind, reshard_after_forward=True)


class Wrapped(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Returning(kind)])
        self.after = nn.Linear(WIDTH, WIDTH)
        self.use = WAYS[kind][1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.before(x))
        return self.after(self.use(self.layers[0], x))


class Returning(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.how = WAYS[kind][0]

    def forward(self, x: torch.Tensor) -> Any:
        return self.how(self, x, self.linear(x))


def _change_in_place(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = layer(x)
    out.mul_(3).add_(x)
    return out


def _change_input_between(module: Returning, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x += module.other(torch.sigmoid(x))
    return torch.tanh(module.linear(x))


def _add_to_input_in_place(module: Returning, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x += torch.tanh(module.other(torch.sigmoid(x)))
    return x


Return = Callable[[Returning, torch.Tensor, torch.Tensor], Any]
Use = Callable[[nn.Module, torch.Tensor], torch.Tensor]

WAYS: dict[str, tuple[Return, Use]] = {
    "a view": (lambda m, x, y: y.view(-1, 2, WIDTH // 2), lambda layer, x: layer(x).flatten(1)),
    "a slice": (lambda m, x, y: torch.tanh(y)[:, 1:], lambda layer, x: nn.functional.pad(layer(x), (1, 0))),
    "views of one tensor": (lambda m, x, y: y.chunk(2, dim=-1), lambda layer, x: torch.cat(layer(x)[::-1], dim=-1)),
    "a view changed in place": (lambda m, x, y: torch.sin(y)[:], _change_in_place),
    "an expanded view changed in place": (
        lambda m, x, y: torch.sin(y).t().unsqueeze(0),
        lambda layer, x: layer(x).mul_(2).squeeze(0).t(),
    ),
    "a tensor changed in place": (lambda m, x, y: y + 1, _change_in_place),
    "one output unused": (lambda m, x, y: (y, torch.tanh(m.other(x))), lambda layer, x: layer(x)[0]),
    "the first output unused": (lambda m, x, y: (torch.tanh(m.other(x)), y), lambda layer, x: layer(x)[1]),
    "None beside": (lambda m, x, y: (None, y, {"cache": None}), lambda layer, x: layer(x)[1]),
    "nothing used": (lambda m, x, y: y, lambda layer, x: x + 0 * layer(x).detach()),
    "the input too": (lambda m, x, y: (x, y), lambda layer, x: torch.mul(*layer(x))),
    "the input only": (lambda m, x, y: x, lambda layer, x: layer(x)),
    "the input changed in place": (_add_to_input_in_place, lambda layer, x: layer(x + 0)),
    "an input changed between two layers": (_change_input_between, lambda layer, x: layer(x + 0)),
    "a detached output beside": (lambda m, x, y: (y.detach(), y), lambda layer, x: torch.mul(*layer(x))),
    "the same tensor twice": (lambda m, x, y: (y, y), lambda layer, x: torch.mul(*layer(x))),
    "a sum and its parts": (lambda m, x, y: (y, y + m.other(y)), lambda layer, x: torch.mul(*layer(x))),
}
"""What an inner module returns, and what the module around it does with that."""


@pytest.mark.behaviour("C-06", "C-04")
@on_ranks(2, environment=COPIES)
def test_views_partly_used_outputs_and_returned_inputs_train() -> None:
    for kind in WAYS:
        check_parity(seeded(Wrapped, kind=kind), play, what=kind, reshard_after_forward=True)


class Filling(nn.Module):
    class Layer(nn.Module):
        def __init__(self, row: int) -> None:
            super().__init__()
            self.linear, self.row = nn.Linear(WIDTH, WIDTH), row

        def forward(self, x: torch.Tensor, filled: torch.Tensor) -> None:
            filled[self.row] = torch.tanh(self.linear(x))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(row) for row in range(3))

    def forward(self, x: torch.Tensor, filled: torch.Tensor) -> None:
        for layer in self.layers:
            layer(x, filled)
            x = torch.tanh(x)


def _needs_gradient() -> Pair:
    filled = torch.ones(3, 2, WIDTH, requires_grad=True) * 1
    return filled, filled


def _view() -> Pair:
    base = torch.zeros(2, 3, 2, WIDTH)
    return base[1], base


FILLED: Mapping[str, Callable[[], Pair]] = {
    "plain": lambda: (filled := torch.zeros(3, 2, WIDTH), filled),
    "needs a gradient": _needs_gradient,
    "view": _view,
}
"""Make a tensor for layers to write into, and the tensor that the loss reads."""


@pytest.mark.behaviour("C-06")
@pytest.mark.parametrize("transport", ["sockets", "copies"])
@on_ranks(2, environment="transport")
def test_modules_train_by_what_they_wrote_into_tensors() -> None:
    for kind, needs_gradient in product(FILLED, (False, True)):

        def play(model: nn.Module, step: int, rank: int, kind: str = kind, *, needs: bool = needs_gradient) -> Any:
            filled, used = FILLED[kind]()
            model(inputs_of(step, rank)[:2].requires_grad_(needs), filled)
            loss = used.square().sum()
            loss.backward()
            return loss.detach()

        check_parity(seeded(Filling), play, what=f"{kind}, {needs_gradient}", reshard_after_forward=True)


class ReturningWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Pair:
        return torch.tanh(self.linear(x)), self.linear.weight


class UsingWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([ReturningWeight()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, weight = self.layers[0](self.before(x))
        return y @ weight


@pytest.mark.behaviour("C-06")
@on_ranks(2)
def test_a_module_that_stays_unsharded_can_return_its_own_weight() -> None:
    check_parity(seeded(UsingWeight), play, reshard_after_forward=False)


class Hiding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(y=torch.tanh(self.linear(x)))


class Seeking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Hiding()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](self.before(x)).y


def train_with_hidden_outputs(frozen: bool) -> None:
    model = Seeking()
    model.layers[0].requires_grad_(not frozen)
    shard_layers(model, fully_shard, reshard_after_forward=True)
    play(model, 0, 0)


@pytest.mark.behaviour("C-06", "H-05")
@pytest.mark.parametrize("frozen", [False, True])
def test_an_output_in_an_object_that_nobody_registered_is_an_error_and_not_a_wrong_gradient(frozen: bool) -> None:
    with pytest.raises(RanksError, match=r"LifecycleError.*'layers\.0'.*register"):
        run_ranks(train_with_hidden_outputs, 2, frozen)


class Cyclic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.holder: Any = None

    def forward(self, x: torch.Tensor, other: Any = None) -> Any:
        y = self.linear(x)
        if self.holder is None:
            return y
        self.holder.append(y)
        return self.holder


@pytest.mark.behaviour("C-06", "H-05")
@on_ranks(1, environment=COPIES)
def test_a_container_that_contains_itself_is_an_error_after_which_training_goes_on() -> None:
    cycle: list[Any] = [torch.ones(WIDTH, requires_grad=True)]
    cycle.append({"cycle": cycle})
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)):
        model, x = Cyclic(), torch.ones(2, WIDTH)
        fully_shard(model, mp_policy=policy)
        with pytest.raises(ConfigurationError, match="an input of 'root' is a container that contains itself"):
            model(x, cycle)
        assert cycle[0].grad_fn is None  # the caller's tensor, and no view of it
        model.holder = []
        model.holder.append((model.holder,))
        with pytest.raises(ConfigurationError, match="the output of 'root' is a container that contains itself"):
            model(x)
        model.holder = None
        model(x).sum().backward()
        assert model.linear.weight.grad is not None
