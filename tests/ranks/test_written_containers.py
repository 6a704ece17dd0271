"""Test containers that a module writes into: the caller sees the writes, and gradients reach the module through them.

Every container begins with one tensor of the caller, ``held``, to which a module adds its results.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from composable_fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from composable_fsdp.trace import Recorder
from tests.helpers.assert_trace import peak_groups
from tests.helpers.models import seeded, shard_layers
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.training import check_parity
from tests.helpers.transports import COPIES, TRANSPORTS

WIDTH = 4

Tensors = list[torch.Tensor]


@dataclass
class Cache:
    held: torch.Tensor
    added: list[torch.Tensor] = field(default_factory=list)
    number: int = 0

    def add(self, y: torch.Tensor) -> None:
        self.added = [*self.added, y]
        self.number += 1
        self.last = y


@dataclass(slots=True)
class Slotted:
    held: torch.Tensor
    added: torch.Tensor | None = None


@dataclass(frozen=True)
class Frozen:
    held: torch.Tensor
    added: list[torch.Tensor]


class Named(NamedTuple):
    held: torch.Tensor
    added: dict[str, torch.Tensor]


class Listed(list[torch.Tensor]):
    """A list of a user's class."""


class Own(MutableMapping[str, Any]):
    def __init__(self, **items: Any) -> None:
        self._items = items
        self.extra = 0

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


@dataclass
class Output(OrderedDict[str, Any]):
    held: torch.Tensor
    added: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self["held"] = self.held

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        made: Any = super().__reduce__()
        return made[0], (self.held, self.added), *made[2:]


class Plain:
    """A registered class. Its children are attributes, and it has one more attribute."""

    def __init__(self, held: torch.Tensor, added: list[torch.Tensor]) -> None:
        self.held, self.added = held, added
        self.owner = self


class Derived:
    """A registered class that makes its children when it is flattened."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.layers = [[each] for each in tensors]

    def tensors(self) -> Tensors:
        return [each for layer in self.layers for each in layer]


pytree.register_pytree_node(Plain, lambda p: ([p.held, p.added], None), lambda children, _: Plain(*children))
pytree.register_pytree_node(Derived, lambda d: (d.tensors(), None), lambda children, _: Derived(*children))


@dataclass(frozen=True)
class Kind:
    """A kind of container. ``read`` returns the caller's tensor, then those that a module added."""

    make: Callable[[torch.Tensor], Any]
    write: Callable[[Any, torch.Tensor], object]
    read: Callable[[Any], Tensors]


def _replace_in_dict(c: dict[str, Any], y: torch.Tensor) -> None:
    c["all"] += (y,)


def _move_and_add(c: list[Any], y: torch.Tensor) -> None:
    c.insert(0, y)


def _replace_nested(c: dict[str, Any], y: torch.Tensor) -> None:
    c["new"] = {"outer": c["old"], "y": [*c.pop("new", {}).get("y", []), y]}


def _set_last(c: Any, y: torch.Tensor) -> None:
    c.added = y


def _add_item(c: Any, y: torch.Tensor) -> None:
    c["added"] = y


def _numbered(c: Any, y: torch.Tensor) -> None:
    c[f"y{len(c)}"] = y


KINDS = {
    "list": Kind(lambda h: [h], lambda c, y: c.append(y), list),
    "list, at its beginning": Kind(lambda h: [h], _move_and_add, lambda c: c[::-1]),
    "list of a user's class": Kind(lambda h: Listed([h]), lambda c, y: c.append(y), list),
    "UserList": Kind(lambda h: UserList([h]), lambda c, y: c.append(y), list),
    "deque": Kind(lambda h: deque([h], maxlen=9), lambda c, y: c.append(y), list),
    "dict": Kind(lambda h: {"h": h}, _numbered, lambda c: list(c.values())),
    "OrderedDict": Kind(lambda h: OrderedDict(h=h), _numbered, lambda c: list(c.values())),
    "defaultdict": Kind(
        lambda h: defaultdict(list, h=[h]), lambda c, y: c["y"].append(y), lambda c: [*c["h"], *c.get("y", [])]
    ),
    "UserDict": Kind(lambda h: UserDict(h=h), _numbered, lambda c: list(c.values())),
    "mapping with its own dict": Kind(lambda h: Own(h=h), _numbered, lambda c: list(c.values())),
    "nested": Kind(
        lambda h: ({"x": [h, {"y": []}]},),
        lambda c, y: c[0]["x"][1]["y"].append(y),
        lambda c: [c[0]["x"][0], *c[0]["x"][1]["y"]],
    ),
    "a new container in it": Kind(
        lambda h: {"old": [h]}, _replace_nested, lambda c: [*c["old"], *c.get("new", {}).get("y", [])]
    ),
    "tuple that grows": Kind(lambda h: {"all": (h,)}, _replace_in_dict, lambda c: list(c["all"])),
    "dataclass": Kind(Cache, Cache.add, lambda c: [c.held, *c.added]),
    "dataclass with slots": Kind(Slotted, _set_last, lambda c: [c.held] if c.added is None else [c.held, c.added]),
    "frozen dataclass": Kind(
        lambda h: Frozen(h, []), lambda c, y: c.added.append(y), lambda c: [c.held, *c.added]
    ),
    "namedtuple": Kind(
        lambda h: Named(h, {}), lambda c, y: _numbered(c.added, y), lambda c: [c.held, *c.added.values()]
    ),
    "dataclass with items": Kind(
        Output, _add_item, lambda c: [c.held] if c.added is None else [c["held"], c["added"]]
    ),
    "registered": Kind(lambda h: Plain(h, []), lambda c, y: c.added.append(y), lambda c: [c.held, *c.added]),
    "registered, children made": Kind(Derived, lambda c, y: c.layers.append([y]), Derived.tensors),
}  # fmt: skip


class Writing(nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.mix, self.side = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.got: Any = None
        self.fails = False

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        self.got = cache
        before = torch.stack([each.sum() for each in self.kind.read(cache)]).sum()
        self.kind.write(cache, torch.tanh(self.side(x)) * before.to(x.dtype))
        if self.fails:
            raise ArithmeticError("test failure")
        return torch.tanh(self.mix(x))

    def other(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        return self.forward(x, cache)


CAST = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WAYS: dict[str, Callable[[nn.Module, torch.Tensor, Any], Any]] = {
    "call": lambda module, x, cache: module(x, cache),
    "keyword": lambda module, x, cache: module(x, cache=cache),
    "forward": lambda module, x, cache: module.forward(x, cache),
    "method": lambda module, x, cache: module.other(x, cache=cache),  # type: ignore[operator]
}
MODES: dict[str, Callable[[], Any]] = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def sharded(*, casts: bool) -> Writing:
    module = Writing(KINDS["list"])
    fully_shard(module, mp_policy=CAST if casts else MixedPrecisionPolicy())
    register_fsdp_forward_method(module, "other")
    return module


def check_writes(module: Writing, kind: Kind, way: str, mode: str, *, casts: bool) -> None:
    module.kind, call = kind, WAYS[way]
    held, x = torch.ones(WIDTH, requires_grad=True), torch.ones(2, WIDTH)
    cache, failed = kind.make(held), kind.make(held)
    with MODES[mode]():
        for number in (1, 2):
            call(module, x, cache)
            found = kind.read(cache)
            assert found[0] is held
            assert len(found) == (2 if kind.write in (_set_last, _add_item) else number + 1)
            assert found[-1].dtype == (torch.bfloat16 if casts else torch.float32)
            assert casts or module.got is cache or isinstance(cache, (tuple, Frozen))
        module.fails = True
        with pytest.raises(ArithmeticError, match="test failure"):
            call(module, x, failed)
        module.fails = False
        assert [each is held for each in kind.read(failed)] == [True, False]
    if mode == "grad":
        module.zero_grad()
        kind.read(cache)[-1].float().sum().backward()
        assert held.grad is not None
        assert module.side.weight.grad is not None
    if isinstance(cache, Cache):
        assert (cache.number, cache.last) == (2, cache.added[-1])
    if isinstance(cache, Plain):
        assert cache.owner is cache


@pytest.mark.behaviour("C-06")
@pytest.mark.parametrize("casts", [False, True])
@on_ranks(1, environment=COPIES)
def test_callers_see_what_modules_write_into_containers(casts: bool) -> None:
    module = sharded(casts=casts)
    for name, way, mode in product(KINDS, WAYS, MODES):
        check_writes(module, KINDS[name], way, mode, casts=casts)


def train_from_written(kinds: list[str]) -> None:
    for number, kind in enumerate(kinds):
        build = seeded(Collecting, kind=kind, frozen=number % 2 == 1)
        check_parity(build, play, what=kind, steps=2, reshard_after_forward=True)
    assert peak_of_frozen_layers() <= 3


def peak_of_frozen_layers() -> int:
    """Return how many groups are in memory at one time in a backward through frozen layers that get a dict."""
    model = Collecting("dict", depth=8).requires_grad_(False)
    shard_layers(model, fully_shard, fuses=False, reshard_after_forward=True)
    out = model(torch.ones(2, WIDTH, requires_grad=True), {"held": torch.ones(WIDTH, requires_grad=True)})
    with Recorder() as recorder:
        out.sum().backward()
    return peak_groups(recorder)


class Collecting(nn.Module):
    def __init__(self, kind: str, *, frozen: bool = True, depth: int = 3) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.kind = KINDS[kind]
        self.layers = nn.ModuleList([Writing(self.kind) for _ in range(depth)])
        if frozen:
            self.layers[1].requires_grad_(False)

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = layer(x, cache)
        return x + sum(self.kind.read(cache)[1:])


def play(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    held = torch.ones(WIDTH, requires_grad=True)
    kind: Any = model.kind
    loss: torch.Tensor = model(x, kind.make(held)).square().mean()
    loss.backward()
    assert held.grad is not None
    return loss.detach()


@pytest.mark.behaviour("C-06")
@pytest.mark.parametrize("transport", ["copies", "in common"])
def test_modules_train_by_what_they_wrote_into_containers(transport: str) -> None:
    kinds = list(KINDS) if transport == "copies" else ["dict", "list"]
    run_ranks(train_from_written, 2, kinds, environment=TRANSPORTS[transport])


class Returning(nn.Module):
    def __init__(self, write: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.write = nn.Linear(WIDTH, WIDTH, bias=False), write

    def forward(self, x: torch.Tensor, cache: Any) -> Any:
        y = self.linear(x)
        return self.write(self, x, y, cache), cache


def check_returned_containers() -> None:
    for param in (None, torch.bfloat16):
        module = Returning(lambda m, x, y, cache: cache.update(y=y) or y)
        policy = MixedPrecisionPolicy(param, torch.float32, output_dtype=torch.float64)
        fully_shard(module, mp_policy=policy)
        held, x = torch.ones(2, WIDTH, requires_grad=True), torch.ones(2, WIDTH)
        inner: list[Any] = []
        cache = {"held": held, "inner": inner}
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                y, returned = module(x, cache)
            assert returned is cache
            assert cache["held"] is held
            assert cache["inner"] is inner
            assert y.dtype == cache["y"].dtype == torch.float64


def check_tensors_written_in_place() -> None:
    """Check that a cast in which a module writes stays in the container, and that others do not."""

    def write(module: Returning, x: torch.Tensor, y: torch.Tensor, cache: Any) -> torch.Tensor:
        with torch.no_grad():
            cache[0][1] = y[0]
        return y

    for mode in MODES:
        module = Returning(write)
        fully_shard(module, mp_policy=CAST)
        cache = [torch.zeros(2, WIDTH), other := torch.zeros(2, WIDTH)]
        with MODES[mode]():
            y, _ = module(torch.ones(2, WIDTH), cache)
            assert torch.equal(cache[0][1], y[0]), mode
            assert cache[1] is other, mode


def check_recomputation_inside() -> None:
    """Check that a recomputation inside a module finds the cast tensors of the caller's container."""

    def write(module: Returning, x: torch.Tensor, y: torch.Tensor, cache: Any) -> Any:
        def use(y: torch.Tensor) -> torch.Tensor:
            return torch.tanh(y) * torch.tanh(y @ cache["held"])

        return checkpoint(use, y, use_reentrant=False)

    module = Returning(write)
    fully_shard(module, mp_policy=CAST)
    cache = {"held": torch.ones(WIDTH, WIDTH, requires_grad=True)}
    module(torch.ones(2, WIDTH), cache)[0].float().sum().backward()
    assert cache["held"].grad is not None


def check_recomputation_around() -> None:
    """Check that the recomputation of a module writes into the caller's container as its forward does."""

    def write(module: Returning, x: torch.Tensor, y: torch.Tensor, cache: Any) -> torch.Tensor:
        cache.append(y)
        return torch.tanh(y * cache[0])

    for reentrant in (False, True):
        for casts in (False, True):
            module = Returning(write)
            fully_shard(module, mp_policy=CAST if casts else MixedPrecisionPolicy())
            cache, x = [held := torch.ones(WIDTH)], torch.ones(2, WIDTH, requires_grad=True)
            y, returned = checkpoint(module, x, cache, use_reentrant=reentrant)
            y.float().sum().backward()
            assert returned is cache
            assert cache[0] is held
            assert len(cache) == 3, (reentrant, casts)
            assert module.linear.weight.grad is not None


def check_shared_containers() -> None:
    def write(module: Returning, x: torch.Tensor, y: torch.Tensor, cache: Any) -> torch.Tensor:
        first, second = cache
        assert first is second
        first.append(y)
        return y * torch.stack([each.sum() for each in second]).sum()

    for casts in (False, True):
        module = Returning(write)
        fully_shard(module, mp_policy=CAST if casts else MixedPrecisionPolicy())
        held = torch.ones(2, WIDTH, requires_grad=True)
        module(torch.ones(2, WIDTH), (shared := [held], shared))
        assert len(shared) == 2
        assert shared[0] is held


def check_interrupts() -> None:
    def write(module: Returning, x: torch.Tensor, y: torch.Tensor, cache: Any) -> torch.Tensor:
        if "stop" in cache:
            raise KeyboardInterrupt
        return y

    module = Returning(write)
    fully_shard(module)
    held = torch.ones(2, WIDTH, requires_grad=True)
    cache = {"held": held, "stop": 1}
    with pytest.raises(KeyboardInterrupt):
        module(torch.ones(2, WIDTH), cache)
    module.reset_iter_state()  # type: ignore[operator]
    module(torch.ones(2, WIDTH), {})
    assert cache["held"] is held


CHECKS = (
    check_returned_containers,
    check_tensors_written_in_place,
    check_recomputation_inside,
    check_recomputation_around,
    check_shared_containers,
    check_interrupts,
)


@pytest.mark.behaviour("C-06")
@on_ranks(1, environment=COPIES)
def test_containers_of_callers_stay_themselves_and_keep_the_callers_tensors() -> None:
    for check in CHECKS:
        check()
