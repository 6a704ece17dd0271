"""Training steps that fail at a chosen point, for the tests of recovery."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import CommunicationPolicy, ErrorFeedback, Int4, Int8, find_nonfinite, fully_shard
from tests._internals import memory as storage
from tests.helpers.faults import Layers
from tests.helpers.injected_faults import Fault, Raise, inject_faults
from tests.helpers.sharding import values_of

DEPTH = 3


@dataclass(frozen=True)
class Plan:
    """A point at which a step fails, and how the model is trained. ``point``: the operation that fails. ``"before"``
    and ``"after"`` are hooks around the forward of a layer, ``"backward"`` is a hook on its output, and ``"gradient"``
    a hook on its gradients. ``"encode"`` and ``"decode"`` are calls of a codec, ``"operation"`` is a launch, and
    ``"allocation"`` allocates full parameters. ``index``: the index of the layer, call, operation or allocation, modulo
    their number. ``microbatch``: the microbatch that fails, modulo the number of microbatches. ``alone``: if true, the
    failure is injected on the last rank only. ``encoded``: if true, parameters and gradients are encoded. ``feedback``:
    if true, gradients are encoded with error feedback, and shards of gradients are accumulated. ``hybrid``: if true,
    four ranks train, and shards are replicated."""

    point: str
    index: int
    microbatch: int
    microbatches: int
    alone: bool
    reshard: bool
    prefetch: bool
    fused: bool
    encoded: bool = False
    hybrid: bool = False
    feedback: bool = False


def build(plan: Plan) -> Any:
    model: Any = Layers(DEPTH)
    mesh = init_device_mesh("cpu", (2, 2) if plan.hybrid else (dist.get_world_size(),))
    codec = Int8() if plan.encoded or plan.point in ("encode", "decode") else None
    of_gradients = ErrorFeedback(Int4()) if plan.feedback else codec
    encoded = CommunicationPolicy(codec, of_gradients, min_numel=1)
    options: Any = {"mesh": mesh, "reshard_after_forward": plan.reshard, "comm_policy": encoded}
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    if not plan.fused:
        model.set_schedule(max_fused_bytes=0)
    if plan.prefetch:
        model.layers[0].set_modules_to_forward_prefetch([model.layers[1], model.layers[2]])
        model.layers[2].set_modules_to_backward_prefetch([model.layers[1], model.layers[0]])
    return model


def pair(plan: Plan) -> tuple[Any, Any, list[torch.optim.Optimizer]]:
    """Return a model for failing steps, a model for successful steps, and the optimizer of each."""
    models = build(plan), build(plan)
    return *models, [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]


def assert_same(model: nn.Module, undisturbed: nn.Module, plan: Plan) -> None:
    expected = values_of(undisturbed)
    for name, value in values_of(model).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=f"{name} after {plan}")


def batch(number: int, microbatch: int) -> torch.Tensor:
    seed = 100 * number + 10 * microbatch + dist.get_rank()
    return torch.randn(2, 16, generator=torch.Generator().manual_seed(seed))


def step(model: Any, plan: Plan, number: int, around: Callable[[], Any] | None = None) -> None:
    """Compute the gradients of one step on all ranks or on none. The plan's microbatch runs inside ``around``."""
    gradients(model, plan, number, around)
    find_nonfinite(model)


def gradients(model: Any, plan: Plan, number: int, around: Callable[[], Any] | None = None) -> None:
    for microbatch in range(plan.microbatches):
        is_last = microbatch == plan.microbatches - 1
        model.set_requires_gradient_sync(is_last or plan.feedback)
        if plan.feedback:  # every microbatch reduce-scatters; only the last one all-reduces
            model.set_requires_all_reduce(is_last)
        if around is not None and microbatch == plan.microbatch % plan.microbatches:
            with around():
                model(batch(number, microbatch)).square().mean().backward()
        else:
            model(batch(number, microbatch)).square().mean().backward()


def fail(*_: object) -> None:
    raise ArithmeticError("test failure")


@contextmanager
def failing_layer(layer: nn.Module, point: str) -> Iterator[None]:
    if point == "before":
        handles = [layer.register_forward_pre_hook(fail)]
    elif point == "after":
        handles = [layer.register_forward_hook(fail)]
    elif point == "gradient":
        handles = [p.register_post_accumulate_grad_hook(fail) for p in layer.parameters()]
    else:
        handles = [layer.register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def counting(owner: Any, name: str, failing: int | None = None) -> Iterator[list[None]]:
    """Record each call of a function, and raise in call number ``failing``."""
    calls: list[None] = []
    original = getattr(owner, name)

    def function(*args: Any) -> Any:
        calls.append(None)
        if len(calls) - 1 == failing:
            fail()
        return original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, function)
        yield calls


COUNTED: dict[str, tuple[Any, str]] = {
    "allocation": (storage.OwnedBuffer, "allocate"),
    "encode": (Int8, "encode"),
    "decode": (Int8, "decode"),
}


@contextmanager
def counting_all(model: Any, counts: dict[str, int]) -> Iterator[None]:
    """Count how often each point of a plan is reached."""
    with inject_faults(model) as labels, ExitStack() as stack:
        calls = {point: stack.enter_context(counting(*where)) for point, where in COUNTED.items()}
        yield
    counts.update({point: len(each) for point, each in calls.items()}, operation=len(labels))


def fault_of(plan: Plan, model: Any, counts: dict[str, int]) -> Callable[[], Any] | None:
    """Return a context in which a microbatch fails, or None if the plan's point does not exist."""
    if plan.point not in counts:
        layer = model.layers[plan.index % DEPTH]
        synchronises = plan.microbatch % plan.microbatches == plan.microbatches - 1
        return (lambda: failing_layer(layer, plan.point)) if plan.point != "gradient" or synchronises else None
    if not counts[plan.point]:
        return None
    number = plan.index % counts[plan.point]
    if plan.point == "operation":
        return lambda: inject_faults(
            model, Fault(Raise(ArithmeticError("test failure of a collective")), number=number)
        )
    return lambda: counting(*COUNTED[plan.point], failing=number)
