"""The class of a sharded module inherits nothing from torch's class of the same name."""

from __future__ import annotations

import abc
import inspect
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from composable_fsdp import FSDPModule, GradientReductionHandle, UnshardHandle, fully_shard, share_comm_ctx
from composable_fsdp.errors import ConfigurationError, UnsupportedError
from tests._internals import CommStream, root_of, state_of

pytestmark = [pytest.mark.behaviour("A-01"), pytest.mark.usefixtures("one_rank")]

T = TypeVar("T")


class Generically(nn.Module, Generic[T]):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Abstract(nn.Module, abc.ABC):
    @abc.abstractmethod
    def scale(self) -> float: ...


class Concrete(Abstract):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def scale(self) -> float:
        return 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.scale()


class WithNew(nn.Module):
    """Its instances record the arguments of ``__new__``."""

    def __new__(cls, *args: Any, **kwargs: Any) -> WithNew:
        made = super().__new__(cls)
        made.__dict__["arguments"] = (args, kwargs)
        return made

    def __init__(self, size: int, *, fill: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), fill))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


def modules() -> list[nn.Module]:
    """Return one module of each kind of class that could be hard to subclass."""
    return [
        nn.Linear(3, 3),
        nn.Sequential(nn.Linear(3, 3), nn.ReLU()),
        nn.LSTM(3, 3),
        Generically[int](),
        Concrete(),
        WithNew(3, fill=1.0),
    ]


@pytest.mark.parametrize("module", modules(), ids=lambda module: type(module).__name__)
def test_a_sharded_module_is_an_instance_of_its_own_class_and_of_both_fsdp_classes(module: nn.Module) -> None:
    original = type(module)
    assert fully_shard(module) is module
    assert type(module) is not original
    assert isinstance(module, original)
    assert isinstance(module, FSDPModule)
    assert isinstance(module, torch_fsdp.FSDPModule)
    assert issubclass(type(module), original)
    assert (type(module).__name__, type(module).__module__) == (f"FSDP{original.__name__}", original.__module__)
    out = module(torch.ones(2, 3))
    (out[0] if isinstance(out, tuple) else out).sum().backward()


def test_modules_of_one_class_share_their_sharded_class_and_others_keep_theirs() -> None:
    first, second, bystander = nn.Linear(2, 2), nn.Linear(3, 3), nn.Linear(2, 2)
    fully_shard(first)
    fully_shard(second)
    assert type(first) is type(second)
    assert type(bystander) is nn.Linear
    assert not isinstance(bystander, FSDPModule)


def test_slicing_and_indexing_a_sharded_container_gives_plain_ones() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = nn.Sequential(OrderedDict(first=nn.Linear(2, 2), second=inner, third=nn.Linear(2, 2)))
    first, _, third = model
    fully_shard(inner)
    fully_shard(model)

    tail = model[1:]
    assert type(tail) is nn.Sequential
    assert list(tail.named_children()) == [("second", inner), ("third", third)]
    assert type(model[:0]) is nn.Sequential
    assert type(inner[:1]) is nn.Sequential
    assert model[0] is first
    assert type(model[0]) is nn.Linear
    assert model[1] is inner
    assert isinstance(model[1], FSDPModule)


def test_calling_the_sharded_class_builds_the_original() -> None:
    module = fully_shard(WithNew(3))
    made = type(module)(4, fill=2.0)
    assert type(made) is WithNew
    assert made.__dict__["arguments"] == ((4,), {"fill": 2.0})
    assert torch.equal(made.weight, torch.full((4,), 2.0))


def is_from_torch_fsdp(owner: type, name: str) -> bool:
    """Return whether ``owner.name`` comes from torch's own implementation, even indirectly."""
    holder = next(cls for cls in owner.__mro__ if name in vars(cls))
    if holder.__module__.startswith(("torch.distributed.fsdp", "torch.distributed._composable")):
        return True
    value = inspect.unwrap(getattr(inspect.getattr_static(owner, name), "__func__", getattr(owner, name)))
    return str(getattr(value, "__module__", "")).startswith(("torch.distributed.fsdp", "torch.distributed._composable"))


# Attributes that every class statement creates, and attributes that only describe a class.
OF_THE_CLASS_STATEMENT = {
    "__module__",
    "__doc__",
    "__dict__",
    "__weakref__",
    "__annotations__",
    "__annotations_cache__",
}
OF_THE_CLASS_STATEMENT |= {"__firstlineno__", "__static_attributes__", "__annotate__", "__annotate_func__"}


def sharded_linear() -> type:
    return type(fully_shard(nn.Linear(1, 1)))


@pytest.mark.behaviour("I-01")
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        pytest.param(lambda: FSDPModule, torch_fsdp.FSDPModule, id="FSDPModule"),
        pytest.param(sharded_linear, torch_fsdp.FSDPModule, id="class of a sharded module"),
        pytest.param(lambda: UnshardHandle, torch_fsdp.UnshardHandle, id="UnshardHandle"),
        pytest.param(
            lambda: GradientReductionHandle,
            getattr(torch_fsdp, "GradientReductionHandle", object),  # from torch 2.15 on
            id="GradientReductionHandle",
        ),
    ],
)
def test_no_attribute_comes_from_torchs_class(ours: Callable[[], type], theirs: type) -> None:
    cls = ours()
    assert issubclass(cls, theirs)
    names = {name for ancestor in cls.__mro__ for name in vars(ancestor)} - OF_THE_CLASS_STATEMENT
    assert set(vars(theirs)) - OF_THE_CLASS_STATEMENT <= names
    assert sorted(name for name in names if is_from_torch_fsdp(cls, name)) == []


@pytest.mark.behaviour("A-18")
@pytest.mark.parametrize("nested", [False, True], ids=["itself", "inside a plain module"])
def test_pickling_is_one_error_that_points_at_state_dicts(nested: bool) -> None:
    module = fully_shard(nn.Linear(2, 2))
    with pytest.raises(UnsupportedError, match=r"pickling a sharded.*state_dict\(\)"):
        pickle.dumps(nn.Sequential(module) if nested else module)
    module(torch.ones(1, 2)).sum().backward()


@pytest.mark.behaviour("C-08")
def test_chunks_of_a_pipeline_share_their_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = fully_shard(nn.Linear(2, 2)), fully_shard(nn.Linear(2, 2))
    inner = fully_shard(nn.Linear(2, 2))
    outer = fully_shard(nn.Sequential(inner))
    share_comm_ctx([first, second])
    assert root_of(state_of(first)).streams is root_of(state_of(second)).streams
    used: list[CommStream] = []
    run = CommStream.run

    def note(stream: CommStream, *args: Any, **options: Any) -> Any:
        used.append(stream)
        return run(stream, *args, **options)

    monkeypatch.setattr(CommStream, "run", note)
    second(first(torch.ones(1, 2))).sum().backward()
    shared = root_of(state_of(first)).streams
    assert set(used) == {shared.gather, shared.reduce}
    assert first.weight.grad is not None
    with pytest.raises(ConfigurationError, match="share_comm_ctx takes sharded modules, not Linear"):
        share_comm_ctx([nn.Linear(2, 2)])
    outer(torch.ones(1, 2))
    with pytest.raises(ConfigurationError, match="'0' is part of Sequential"):
        share_comm_ctx([first, inner])
