"""Builds, uses and drops models, and finds the objects that remain in memory."""

from __future__ import annotations

import copy
import gc
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from composable_fsdp import (
    CommunicationPolicy,
    ErrorFeedback,
    Int8,
    MixedPrecisionPolicy,
    describe,
    fully_shard,
    local_optimizer,
    no_sync,
    register_fsdp_forward_method,
    unsharded_params,
)
from composable_fsdp.checkpoint import load, save
from tests._internals import Bucket, InPlaceBucket, find_state
from tests.helpers.extension_tensors import Pair, with_weights

CASES: dict[str, Callable[[], tuple[object, ...]]] = {}
"""Each case builds models, uses them, and returns the models and other objects that must be freed."""

X = torch.ones(4, 8)


def remaining_objects(case: Callable[[], tuple[object, ...]]) -> list[str]:
    """Return the objects of ``case`` that remain in memory after they are dropped, with the garbage collector disabled.
    The objects are modules, the library's state of the modules, the memory of shards, and other objects that the case
    returns. If any remain, the case runs again, because torch may keep memory from the first run."""
    return _remaining_after(case) and _remaining_after(case)


def _remaining_after(case: Callable[[], tuple[object, ...]]) -> list[str]:
    gc.collect()
    gc.disable()
    try:
        known = [(name, weakref.ref(obj)) for dropped in case() for name, obj in _objects_of(dropped)]
        return [name for name, alive in known if alive() is not None]
    finally:
        gc.enable()


def _objects_of(dropped: object) -> list[tuple[str, Any]]:
    if not isinstance(dropped, nn.Module):
        return [(type(dropped).__name__, dropped)]
    objects: list[tuple[str, Any]] = []
    for name, module in dropped.named_modules():
        state = find_state(module)
        objects.append((f"module {name!r}", module))
        if state is not None:
            known = [bucket for bucket in state.group.buckets if isinstance(bucket, (Bucket, InPlaceBucket))]
            stores = [tensor for bucket in known for tensor in bucket.versioned]
            objects += [(f"unit {name!r}", state), *((f"shards of {name!r}", store) for store in stores)]
            if state.root is not None:
                objects.append((f"iteration of {name!r}", state.root))
    return objects


def case(build: Callable[[], tuple[object, ...]]) -> Callable[[], tuple[object, ...]]:
    CASES[build.__name__.replace("_", " ")] = build
    return build


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8))


def sharded(model: Any, **options: Any) -> Any:
    for child in model.children():
        fully_shard(child, **options)
    return fully_shard(model, **options)


def step(model: Any, *optimizers: torch.optim.Optimizer, x: torch.Tensor = X) -> None:
    model(x).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@case
def nested_groups() -> tuple[object, ...]:
    model = sharded(layers())
    step(model)
    step(model)
    return (model,)


@case
def a_model_that_never_ran() -> tuple[object, ...]:
    return (sharded(layers()),)


@case
def optimizers() -> tuple[object, ...]:
    model = sharded(layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    step(model, optimizer)
    other = sharded(layers())
    local = local_optimizer(torch.optim.SGD(other.parameters(), lr=0.1))
    step(other, local)
    return model, other, optimizer, local


@case
def forwards_without_backward() -> tuple[object, ...]:
    model = sharded(layers(), reshard_after_forward=False)
    loss = model(X).sum()
    with torch.no_grad():
        model(X)
    with torch.inference_mode():
        model.eval()(X)
    return model, loss


@case
def a_graph_that_outlives_the_model() -> tuple[object, ...]:
    """Check that backward runs and computes gradients after the model is dropped."""
    model = sharded(layers())
    step(model)
    weight = model[0].weight
    before = weight.grad.to_local().clone()
    weight.grad = None
    loss = model(X).sum()
    del model
    loss.backward()
    assert torch.equal(weight.grad.to_local(), before)
    return (loss,)


class KeepsOutput(nn.Module):
    """Keeps its output and therefore the autograd graph, like layers with an auxiliary loss."""

    output: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.output = self.linear(x)
        return self.output


@case
def a_module_that_keeps_its_graph() -> tuple[object, ...]:
    model = sharded(nn.Sequential(KeepsOutput(), KeepsOutput()))
    model(X).sum().backward(retain_graph=True)
    model(X)
    return (model,)


class TwoInputs(nn.Module):
    """Uses one input, returns the second unchanged, and returns a view of the third."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, y, z = inputs
        return self.linear(x) + z, y, z[:, :]


@case
def several_inputs() -> tuple[object, ...]:
    model = sharded(nn.Sequential(TwoInputs(), TwoInputs()))
    x = torch.ones(4, 8, requires_grad=True)
    model((x * 2, x * 3, x * 4))[0].sum().backward()
    return (model,)


@case
def a_list_of_modules() -> tuple[object, ...]:
    model = layers()
    fully_shard([model[0], model[1]])
    fully_shard(model)
    step(model)
    return (model,)


@case
def submodules_that_ran_before_the_root() -> tuple[object, ...]:
    model = layers()
    for module in (fully_shard(model[0]), fully_shard(model[1]), fully_shard(model)):
        step(module)
    return (model,)


@case
def a_submodule_that_outlives_the_root() -> tuple[object, ...]:
    model = sharded(layers())
    step(model)
    module = model[0]
    del model
    step(module)
    return (module,)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle, self.head = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embedding(x)))


@case
def shared_parameters() -> tuple[object, ...]:
    model = Tied()
    model.head.weight = model.embedding.weight
    fully_shard(model.embedding)
    fully_shard(model.head, shared_from=[model.embedding])
    fully_shard(model)
    late = sharded(Tied())
    late.head.weight = late.embedding.weight
    for each in (model, late):
        step(each)
    return model, late


class Recurrent(nn.Module):
    """Intercepts the assignment of its parameters like ``nn.LSTM``, and has a second public method."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x)[0]

    def generate(self, x: torch.Tensor, times: int = 2) -> torch.Tensor:
        for _ in range(times):
            x = self(x)
        return x


@case
def other_methods() -> tuple[object, ...]:
    model: Any = fully_shard(Recurrent())
    register_fsdp_forward_method(model, "generate")
    clone = copy.deepcopy(model)
    for each in (model, clone):
        step(each)
        each.generate(X).sum().backward()
    return model, clone


@case
def hooks_and_prefetch_lists() -> tuple[object, ...]:
    model = sharded(layers())
    first, second, third = model
    first.set_modules_to_forward_prefetch([second, third])
    second.set_modules_to_forward_prefetch([third])
    third.set_modules_to_backward_prefetch([second, first])
    second.set_modules_to_backward_prefetch([first])
    model.register_forward_hook(lambda module, args, output: output)
    second.register_full_backward_hook(lambda *_: None)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: None)
    step(model)
    return (model,)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self._use_reentrant = inner, use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self._use_reentrant)


@case
def activation_checkpointing() -> tuple[object, ...]:
    models = [Checkpointed(sharded(layers()), use_reentrant=reentrant) for reentrant in (False, True)]
    for model in models:
        step(model, x=torch.ones(4, 8, requires_grad=True))
    return tuple(models)


@case
def steps_that_fail() -> tuple[object, ...]:
    model, reset = sharded(layers()), sharded(layers())
    for each in (model, reset):
        handle = each[2].register_forward_pre_hook(_fail)
        with suppress(ArithmeticError):
            step(each)
        handle.remove()
    reset.reset_iter_state()
    step(reset)
    handle = reset[0].register_forward_hook(_fail_in_backward)
    with suppress(ArithmeticError):
        step(reset)
    handle.remove()
    return model, reset


def _fail(*_: object) -> None:
    raise ArithmeticError


def _fail_in_backward(module: nn.Module, args: object, output: torch.Tensor) -> None:
    output.register_hook(_fail)


@case
def full_parameters_copies_and_conversions() -> tuple[object, ...]:
    model = sharded(layers())
    step(model)
    with unsharded_params(model):
        pass
    clone = copy.deepcopy(model)
    step(clone)
    clone.load_state_dict(model.state_dict())
    clone.to(torch.float64)
    step(clone, x=X.double())
    str(describe(model))
    assert model[0]._get_fsdp_state()._fsdp_param_group.fsdp_params
    handle = model.unshard(async_op=True)
    return model, clone, handle


@case
def accumulation_and_choices() -> tuple[object, ...]:
    model = sharded(layers(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model.set_reduce_scatter_unused_params(True)
    with no_sync(model):
        step(model)
    step(model)
    with no_sync(model):
        step(model)
    return (model,)


@case
def codecs_and_tensors_with_hooks() -> tuple[object, ...]:
    codecs = CommunicationPolicy(all_gather=Int8(), reduce_scatter=ErrorFeedback(Int8()), min_numel=0)
    encoded = sharded(layers(), comm_policy=codecs)
    extended = sharded(with_weights(layers(), Pair))
    for each in (encoded, extended):
        step(each)
    return encoded, extended


@case
def checkpoints() -> tuple[object, ...]:
    model = sharded(layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    folders: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    save(folders[0], model, optimizer, {"step": 1})
    load(folders[0], model, optimizer)
    save(folders[0], model, optimizer, {"step": 2}, asynchronous=True).wait()
    step(model, optimizer)
    return model, optimizer
