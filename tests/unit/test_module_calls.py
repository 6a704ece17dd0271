"""Calls of sharded modules run our hooks directly, unless other hooks, a tool or a user has a part in the call."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from composable_fsdp import fully_shard
from composable_fsdp.errors import LifecycleError

pytestmark = pytest.mark.usefixtures("one_rank")

TORCH_LOOP = nn.Module._call_impl.__code__
BATCH = torch.arange(8.0).view(2, 4)


def sharded() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for part in (*model, model):
        fully_shard(part)
    return model


def gradients(model: Any) -> list[torch.Tensor]:
    model.zero_grad()
    model(BATCH).square().sum().backward()
    return [p.grad.full_tensor().clone() for p in model.parameters()]


@contextmanager
def torch_loops() -> Iterator[list[int]]:
    """Count the calls that run torch's loops over hooks."""
    count = [0]

    def note(frame: FrameType, event: str, _: Any) -> None:
        count[0] += (
            event == "call"
            and frame.f_code is TORCH_LOOP
            and "_composable_fsdp_state" in frame.f_locals["self"].__dict__
        )

    sys.setprofile(note)
    try:
        yield count
    finally:
        sys.setprofile(None)


def test_a_module_without_other_hooks_calls_ours_directly_and_so_does_a_copy() -> None:
    model, plain = sharded(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    plain(BATCH).square().sum().backward()
    for each in (model, copy.deepcopy(model)):
        with torch_loops() as loops:
            found = gradients(each)
        assert loops == [0]
        torch.testing.assert_close(found, [p.grad for p in plain.parameters()])


Noted = list[str]


@contextmanager
def removed_later(*handles: Any) -> Iterator[None]:
    yield
    for handle in handles:
        handle.remove()


def _patched(owner: Any, name: str, seen: Noted) -> AbstractContextManager[Any]:
    original = getattr(owner, name)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(type(self).__name__)
        return original(self, *args, **kwargs)

    return mock.patch.object(owner, name, call)


def _patched_forward(model: Any, seen: Noted) -> AbstractContextManager[Any]:
    original = model[0].forward

    def forward(self: nn.Module, x: torch.Tensor) -> Any:
        seen.append(type(self).__name__)
        return original(x)

    return mock.patch.dict(vars(model[0]), forward=types.MethodType(forward, model[0]))


TOOLS: dict[str, Callable[[Any, Noted], AbstractContextManager[Any]]] = {
    "pre-hook": lambda m, seen: removed_later(m[0].register_forward_pre_hook(lambda *_: seen.append("a"))),
    "hook": lambda m, seen: removed_later(m[0].register_forward_hook(lambda *_: seen.append("a"))),
    "full backward hook": lambda m, seen: removed_later(m[1].register_full_backward_hook(lambda *_: seen.append("a"))),
    "full backward pre-hook": lambda m, seen: removed_later(
        m[1].register_full_backward_pre_hook(lambda *_: seen.append("a"))
    ),
    "hook of all modules": lambda m, seen: removed_later(register_module_forward_hook(lambda *_: seen.append("a"))),
    "pre-hook of all modules": lambda m, seen: removed_later(
        register_module_forward_pre_hook(lambda *_: seen.append("a"))
    ),
    "__call__ of all modules": lambda m, seen: _patched(nn.Module, "__call__", seen),
    "_call_impl of all modules": lambda m, seen: _patched(nn.Module, "_call_impl", seen),
    "forward of the object": _patched_forward,
    "forward of the class": lambda m, seen: _patched(type(m[0]), "forward", seen),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_tools_and_hooks_that_come_later_have_their_part_in_the_call(tool: str) -> None:
    model = sharded()
    expected, seen = gradients(model), list[str]()
    with TOOLS[tool](model, seen):
        torch.testing.assert_close(gradients(model), expected, rtol=0, atol=0)
    assert seen, "the call has passed it by"
    count = len(seen)
    torch.testing.assert_close(gradients(model), expected, rtol=0, atol=0)
    assert len(seen) == count


def test_a_removed_hook_of_ours_is_not_run_directly() -> None:
    model = fully_shard(nn.Linear(4, 4))
    (hook,) = model._forward_hooks.values()
    model._forward_hooks.clear()
    model.register_forward_hook(lambda module, args, output: hook(module, args, output), always_call=True)
    with torch_loops() as loops:
        model(BATCH).sum().backward()
    assert loops == [1]
    assert model.weight.grad is not None


def test_a_class_with_its_own_call_keeps_it() -> None:
    class Counted(nn.Linear):
        calls = 0

        def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
            Counted.calls += 1
            return super()._call_impl(*args, **kwargs)

    model = fully_shard(Counted(4, 4))
    model(BATCH).sum().backward()
    assert Counted.calls == 1
    assert model.weight.grad is not None


class Fails(nn.Linear):
    error: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        if self.error is not None:
            raise self.error
        return output


@pytest.mark.parametrize("error", [ValueError("in forward"), KeyboardInterrupt()])
def test_what_an_exception_leaves_is_as_with_torchs_loop(error: BaseException) -> None:
    ends = []
    for has_hook in (False, True):
        model: Any = nn.Sequential(Fails(4, 4))
        for part in (*model, model):
            fully_shard(part)
        if has_hook:
            for part in (*model, model):
                part.register_forward_hook(lambda *_: None)
        model[0].error = error
        with pytest.raises(type(error)):
            model(BATCH)
        model[0].error = None
        try:
            model(BATCH).sum().backward()
            ends.append("went on")
        except LifecycleError as refused:
            ends.append(str(refused))
    assert ends[0] == ends[1]
