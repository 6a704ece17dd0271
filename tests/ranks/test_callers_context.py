"""Sharded models inside transforms, modes, autocast and default settings of the caller, from the first call on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from composable_fsdp import CommunicationPolicy, Int8, fully_shard
from tests.helpers.forward_mode import load_forward_mode
from tests.helpers.run_ranks import on_ranks
from tests.helpers.sharding import assert_exact
from tests.helpers.transports import IN_COMMON, SOCKETS

pytestmark = pytest.mark.behaviour("C-18")

WORLDS = [(1, IN_COMMON), (2, IN_COMMON), (2, SOCKETS)]
in_worlds = pytest.mark.parametrize(("ranks", "environment"), WORLDS, ids=["1 rank", "shared memory", "sockets"])

_ATEN = torch.ops.aten
OF_HOOKS = {_ATEN.view.default, _ATEN.detach.default}
"""The views that hooks take of inputs, and what autograd does to them."""


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func] += func not in OF_HOOKS
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Counts the functions that it sees, without reads of attributes and the views of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.seen[name] += name not in ("__get__", "view_as", "is_floating_point", "register_hook")
        return func(*args, **(kwargs or {}))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "dispatch mode": Operations,
    "function mode": Functions,
    "default device": partial(torch.device, "meta"),
    "default dtype": partial(default_dtype, torch.float64),
    "autocast that is off": partial(torch.autocast, "cpu", torch.bfloat16, enabled=False),
}


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))


def batch(seed: int = 1) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def shard(model: nn.Sequential, **options: Any) -> Any:
    fully_shard(model[0], **options)
    fully_shard(model[2], **options)
    return fully_shard(model, **options)


def _dual(model: nn.Module, x: torch.Tensor, tangent: torch.Tensor) -> Sequence[torch.Tensor | None]:
    with forward_ad.dual_level():
        unpacked: Sequence[torch.Tensor | None] = forward_ad.unpack_dual(model(forward_ad.make_dual(x, tangent)))
        return unpacked


@in_worlds
@on_ranks("ranks", environment="environment")
def test_the_first_and_later_calls_run_inside_transforms() -> None:
    load_forward_mode()
    plain, x, tangent = build(), batch(), batch(2)

    def sum_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().sum()

    transforms: dict[str, Callable[[nn.Module], Any]] = {
        "jvp": lambda model: torch.func.jvp(model, (x,), (tangent,)),
        "vmap": lambda model: (torch.vmap(model)(x),),
        "vmap of jvp": lambda model: torch.vmap(lambda *each: torch.func.jvp(model, each[:1], each[1:]))(x, tangent),
        "jacobian": lambda model: (torch.func.jacfwd(model)(x[0]),),
        "value": lambda model: (torch.vmap(partial(sum_of, model))(x),),
        "gradient": lambda model: (torch.func.grad(partial(sum_of, model))(x),),
        "gradient by sample": lambda model: (torch.vmap(torch.func.grad(partial(sum_of, model)))(x),),
        "dual number": lambda model: _dual(model, x, tangent),
    }
    with torch.no_grad():
        model: Any = None
        for name, transform in transforms.items():
            model = shard(build())
            for call in ("first", "second"):
                for got, want in zip(transform(model), transform(plain), strict=True):
                    torch.testing.assert_close(got, want, msg=f"{name}, {call} call: {got}, not {want}")
    model(x).sum().backward()  # it trains after calls in transforms
    plain(x).sum().backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), want.grad)


def train(
    inside: Callable[[], AbstractContextManager[Any]], around_fully_shard: Callable[[], AbstractContextManager[Any]]
) -> list[torch.Tensor]:
    model: Any = build()
    results = []
    with around_fully_shard():
        shard(model, comm_policy=CommunicationPolicy(reduce_scatter=Int8(block=4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        x = batch(step).requires_grad_()
        with inside():
            loss = model(x).square().sum()
        with inside():
            loss.backward()
        assert x.grad is not None
        results.append(x.grad)
        with inside():
            optimizer.step()
            optimizer.zero_grad()
    first: Any = model[0]
    with inside():
        handle = first.unshard(async_op=True)
        handle.wait()
        assert type(first.weight) is nn.Parameter
        results.append(first.weight.detach().clone())
        first.reshard()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state)
    results.extend(value.full_tensor() for value in state.values())
    return results


@in_worlds
@on_ranks("ranks", environment="environment")
def test_settings_of_the_caller_change_no_result() -> None:
    expected = train(nullcontext, nullcontext)
    for name, context in SETTINGS.items():
        for i, (got, want) in enumerate(zip(train(context, context), expected, strict=True)):
            assert_exact(got, want, f"{name}, result {i}")


@in_worlds
@on_ranks("ranks", environment="environment")
def test_modes_see_the_operations_of_the_model_alone() -> None:
    for kind in (Operations, Functions):
        seen = []
        for is_sharded in (False, True):
            model = shard(build()) if is_sharded else build()
            for step in range(2):
                x = batch(step).requires_grad_()
                with kind() as forward:
                    loss = model(x).square().sum()
                with kind() as backward:
                    loss.backward()
                model.zero_grad()
                seen.append((kind, step, forward.seen, backward.seen))
        assert seen[2:] == seen[:2]


class Watching(Operations):
    observes_sharding = True


@on_ranks(2)
def test_a_mode_sees_the_library_if_its_class_asks_for_it_and_all_modes_are_put_back() -> None:
    model = shard(build())
    with Operations() as outer, Watching() as watching, Operations() as inner:
        model(batch())
        assert _get_current_dispatch_mode_stack() == [outer, watching, inner]
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(batch().T)
        assert _get_current_dispatch_mode_stack() == [outer, watching, inner]
    assert outer.seen == inner.seen
    assert watching.seen > inner.seen


@in_worlds
@on_ranks("ranks", environment="environment")
def test_autocast_gives_the_gradients_of_the_plain_model() -> None:
    for around_backward in (False, True):
        grads: list[list[Any]] = []
        for is_sharded in (False, True):
            model = shard(build()) if is_sharded else build()
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(batch()).square().sum()
                    if around_backward:
                        loss.backward()
                if not around_backward:
                    loss.backward()
            found: list[Any] = [p.grad for p in model.parameters()]
            grads.append([each.full_tensor() for each in found] if is_sharded else found)
        for got, want in zip(grads[1], grads[0], strict=True):
            assert_exact(got, want, "gradient")


class Product(torch.Tensor):
    """Sends twice its values, halved by a product of matrices after the all-gather, which autocast would round."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.as_subclass(torch.Tensor) * 2,), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        (sent,) = outputs
        halved = sent @ torch.diag(sent.new_full((sent.size(1),), 0.5))
        if out is None:
            return halved, (halved,)
        return out.copy_(halved)


@on_ranks(2)
def test_hooks_of_tensor_subclasses_run_outside_of_autocast() -> None:
    model: Any = nn.Linear(6, 9, bias=False)
    model.weight = nn.Parameter(Product(model.weight.detach()))
    expected = model.weight.detach().as_subclass(torch.Tensor)
    fully_shard(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(batch()).sum().backward()
        model.unshard()
    assert_exact(model.weight.detach().as_subclass(torch.Tensor), expected, "weight")


class Region(nn.Sequential):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.way: Callable[..., Any] = lambda run, x: run(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.way(super().forward, x)


def _keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = operation in (_ATEN.mm.default, _ATEN.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_all(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def _selectively(policy: Callable[..., CheckpointPolicy], **options: Any) -> Callable[..., Any]:
    return partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy), **options
    )


WAYS: dict[str, Callable[..., Any]] = {
    "products kept": _selectively(_keep_products),
    "all kept": _selectively(_keep_all),
    "late stop": _selectively(_keep_products, early_stop=False),
    "inside of another": lambda run, x: checkpoint(
        lambda y: _selectively(_keep_products)(run, y), x, use_reentrant=False
    ),
    "around another": lambda run, x: _selectively(_keep_products)(lambda y: checkpoint(run, y, use_reentrant=False), x),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "inside of a reentrant one": lambda run, x: checkpoint(
        lambda y: _selectively(_keep_products)(run, y), x, use_reentrant=True
    ),
}


@on_ranks(2, environment=SOCKETS)
def test_regions_of_sharded_modules_are_checkpointed_selectively() -> None:
    for name, way in WAYS.items():
        for shards_layers in (True, False):
            for frozen in (False, True):
                grads: list[list[Any]] = []
                for is_sharded in (False, True):
                    torch.manual_seed(0)
                    block = Region(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6), nn.Tanh())
                    block[0].requires_grad_(not frozen)
                    block.way = way
                    model = nn.Sequential(nn.Linear(6, 6), block, nn.Linear(6, 2))
                    for each in (block[0], block[2]) if is_sharded and shards_layers else ():
                        fully_shard(each)
                    if is_sharded:
                        fully_shard(block)
                        fully_shard(model)
                    for step in range(2):
                        model(batch(step)).square().sum().backward()
                    grads.append([p.grad for p in model.parameters()])
                for got, want in zip(grads[1], grads[0], strict=True):
                    assert (got is None) == (want is None)
                    if got is not None:
                        torch.testing.assert_close(got.full_tensor(), want, msg=f"{name}: {got}, not {want}")
