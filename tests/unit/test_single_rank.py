"""Training on one rank, modules without parameters, the meta device, and conversions."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import register_parametrization
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from composable_fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, no_sync
from composable_fsdp.errors import LifecycleError, ParameterError
from composable_fsdp.trace import Operation, Recorder
from tests._internals import backend_capabilities
from tests.helpers.models import Task, seeded, squared_error, vectors
from tests.helpers.sharding import adamw, assert_exact, sharded, train_and_compare, values_of

pytestmark = pytest.mark.usefixtures("own_rank")


class Spy(nn.Module):
    """Has two linear layers. ``seen`` holds the address of the first weight in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.register_buffer("scale", torch.ones(3))
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.first.weight.data_ptr())
        return self.second(torch.tanh(self.first(x))) * self.scale


TASK = Task(seeded(Spy), vectors(5, 3), squared_error)


def task_in(dtype: torch.dtype) -> Task:
    return Task(TASK.build, lambda g: tuple(t.to(dtype) for t in TASK.batch(g)), nn.functional.mse_loss)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.behaviour("A-16")
@pytest.mark.parametrize("reshard", [True, False, None, 1])
@pytest.mark.parametrize("shape", [(1,), (1, 1)], ids=str)
@pytest.mark.parametrize("nested", [False, True], ids=["one group", "nested groups"])
def test_one_rank_trains_with_parity_and_without_communication(reshard, shape: tuple[int, ...], nested: bool) -> None:
    """The process group is destroyed before training begins."""
    model, reference = TASK.build(), TASK.build()
    mesh = init_device_mesh("cpu", shape)
    if nested:
        fully_shard(model.get_submodule("first"), mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    dist.destroy_process_group()
    try:
        with Recorder() as recorder:
            optimizers = [adamw(model.parameters()), adamw(reference.parameters())]
            for step in range(3):
                losses = [TASK.loss(m, TASK.batch_of(step, 0)) for m in (model, reference)]
                assert_exact(losses[0], losses[1], "loss")
                for loss, optimizer in zip(losses, optimizers, strict=True):
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(parameter, DTensor)
        assert_exact(parameter._local_tensor, expected.detach(), name)
    moved = [e for e in recorder if e.operation in (Operation.UNSHARD, Operation.ALLOCATE, Operation.FREE)]
    assert moved
    assert {e.bytes for e in moved} == {0}


class UsedAroundCheckpoints(nn.Module):
    """Uses ``middle`` in two reentrant checkpoints, of which backward reaches the first after all of ``outer``."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Parameter(torch.full((4,), 2.0))
        self.outer = nn.ParameterList(torch.full((4,), 3.0) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for outer in self.outer:
            x = checkpoint(self.middle.mul, x, use_reentrant=True) * outer
        return x


def test_gradients_from_reentrant_checkpoints_do_not_complete_a_group() -> None:
    """The group has three gradients, and ``middle`` gets two of the four that arrive."""
    model, reference = fully_shard(UsedAroundCheckpoints()), UsedAroundCheckpoints()
    with Recorder() as recorder:
        for each in (model, reference):
            each(torch.ones(4, requires_grad=True)).sum().backward()
    assert [event.operation for event in recorder].count(Operation.REDUCE) == 1
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(parameter.grad, DTensor)
        assert expected.grad is not None
        assert_exact(parameter.grad._local_tensor, expected.grad, "gradient")


@dataclass
class MappedOutput(OrderedDict[str, torch.Tensor]):
    """A dataclass whose fields are also its items, like every output of transformers."""

    hidden: torch.Tensor

    def __post_init__(self) -> None:
        self["hidden"] = self.hidden

    def __reduce__(self) -> Any:
        return type(self), (self.hidden,)


class TakesMapped(nn.Module):
    """Takes and returns :class:`MappedOutput`, and reads it by key."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.taken: list[torch.dtype] = []

    def forward(self, x: MappedOutput) -> MappedOutput:
        self.taken = [x.hidden.dtype, x["hidden"].dtype]
        return MappedOutput(self.linear(x["hidden"]))


@pytest.mark.behaviour("C-06", "D-01")
def test_a_dataclass_that_is_a_mapping_is_cast_in_both_its_forms() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    model = fully_shard(TakesMapped(), mp_policy=policy)
    given = MappedOutput(torch.ones(2, 3))
    out = model(given)
    assert model.taken == [torch.bfloat16] * 2
    assert (out.hidden.dtype, out["hidden"].dtype) == (torch.float64, torch.float64)
    assert out["hidden"] is out.hidden
    assert given["hidden"] is given.hidden
    assert given.hidden.dtype == torch.float32, "the caller's input must be unchanged"


@pytest.mark.parametrize("backend", [None, "gloo", "cpu:gloo"])
def test_the_backend_of_a_device_does_not_depend_on_how_the_job_named_it(backend: str | None) -> None:
    """Torch's names of these backends are ``undefined``, ``gloo`` and ``cpu:gloo``."""
    dist.destroy_process_group()
    try:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        world = dist.group.WORLD
        assert world is not None
        assert [backend_capabilities(world, device).name for device in ("cpu", "meta")] == ["gloo", ""]
    finally:
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.behaviour("A-16")
@pytest.mark.parametrize("reshard", [True, False, None])
def test_on_one_rank_unsharded_parameters_are_the_shards_own_memory(reshard: bool | None) -> None:
    model = TASK.build()
    assert isinstance(model, Spy)
    fully_shard(model, reshard_after_forward=reshard)
    optimizer = adamw(model.parameters())
    for step in range(2):
        TASK.loss(model, TASK.batch_of(step, 0)).backward()
        optimizer.step()
    shards = {name: p.to_local().data_ptr() for name, p in model.named_parameters() if isinstance(p, DTensor)}
    assert len(shards) == 4
    assert model.seen == [shards["first.weight"]] * 2
    sharded(model).unshard()
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == shards


@pytest.mark.behaviour("A-16", "F-04")
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("on_meta", [True, False])
def test_frozen_parameters_of_one_rank_follow_loaded_weights_without_a_copy(reshard: bool, on_meta: bool) -> None:
    with torch.device("meta" if on_meta else "cpu"):
        linear = nn.Linear(8, 4).requires_grad_(False)
    model: Any = fully_shard(linear, reshard_after_forward=reshard)
    model.to_empty(device="cpu")
    memory = {name: p.to_local().data_ptr() for name, p in model.named_parameters()}
    for value in (1.0, 2.0):
        model.load_state_dict({name: torch.full_like(p, value) for name, p in model.state_dict().items()})
        assert torch.equal(model(torch.ones(2, 8)), torch.full((2, 4), 9 * value))
        model.unshard()
        assert {name: p.data_ptr() for name, p in model.named_parameters()} == memory
        model.reshard()
    values = {name: torch.full_like(p, 3.0) for name, p in model.state_dict().items()}
    model.load_state_dict(values, assign=True)
    assert torch.equal(model(torch.ones(2, 8)), torch.full((2, 4), 27.0))
    model.reshard()
    assert not {p.to_local().data_ptr() for p in model.parameters()} & set(memory.values())


class Borrowed(TwoTensor):
    """Two tensors that modules compute with in their own memory."""

    def fsdp_get_unsharded_view(self, mesh: DeviceMesh, module: nn.Module, policy: MixedPrecisionPolicy) -> TwoTensor:
        assert isinstance(module, nn.Linear)
        assert (mesh.size(), policy) == (1, MixedPrecisionPolicy())
        return Borrowed(self.a, self.b)


@pytest.mark.behaviour("A-16", "E-01")
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("on_meta", [True, False])
def test_frozen_tensors_choose_their_view_which_follows_loaded_weights(reshard: bool, on_meta: bool) -> None:
    with torch.device("meta" if on_meta else "cpu"):
        linear = nn.Linear(8, 4).requires_grad_(False)
        weight = linear.weight.detach()
        linear.weight = nn.Parameter(Borrowed(weight, weight.clone()), requires_grad=False)
    model: Any = fully_shard(linear, reshard_after_forward=reshard)
    if on_meta:
        model.to_empty(device="cpu")
    made = None
    for value in (1.0, 2.0):
        model.load_state_dict({name: torch.full_like(p, value) for name, p in model.state_dict().items()})
        output = model(torch.ones(2, 8))
        assert torch.equal(output.a, torch.full((2, 4), 9 * value))
        assert torch.equal(output.b, output.a)
        local = model.weight.to_local() if reshard else model.state_dict()["weight"].to_local()
        model.unshard()
        assert made is None or model.weight is made
        made = model.weight
        assert type(made.data) is Borrowed
        assert (made.a.data_ptr(), made.b.data_ptr()) == (local.a.data_ptr(), local.b.data_ptr())
        model.reshard()
        assert made.a.untyped_storage().nbytes() > 0


@pytest.mark.behaviour("E-01")
def test_a_view_can_be_declined_and_must_look_like_the_parameter() -> None:
    for hook, text in (
        (lambda *_: None, None),
        (lambda local, *_: local.double(), r"returned \(4, 8\) torch.float64 cpu; it must return a tensor with the"),
        (lambda *_: 3, "returned int; it must return a tensor with the parameter's local shape, dtype, and device"),
    ):
        model: Any = fully_shard(nn.Linear(8, 4).requires_grad_(False), reshard_after_forward=False)
        local = model.weight.to_local()
        shard = model.weight._local_tensor
        shard.fsdp_get_unsharded_view = partial(hook, shard)
        if text is not None:
            with pytest.raises(ParameterError, match=f"^fsdp_get_unsharded_view of parameter 'weight' {text}"):
                model(torch.ones(2, 8))
            continue
        model(torch.ones(2, 8))
        assert torch.equal(model.weight, local)
        assert model.weight.data_ptr() != local.data_ptr()


@pytest.mark.behaviour("A-16", "D-01")
@pytest.mark.parametrize("reshard", [True, False])
def test_one_rank_with_mixed_precision_computes_in_bf16_and_steps_in_fp32(reshard: bool) -> None:
    """The results are bitwise equal to a bf16 copy of fp32 master weights."""
    model, master = TASK.build(), TASK.build()
    compute = copy.deepcopy(master).bfloat16()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16), reshard_after_forward=reshard)
    ours, theirs = sgd(model.parameters()), sgd(master.parameters())
    compute.scale.data = compute.scale.float()  # buffers are not cast
    for step in range(3):
        x, target = TASK.batch_of(step, 0)
        loss = squared_error(model(x), target)
        loss.backward()
        with torch.no_grad():
            for low, high in zip(compute.parameters(), master.parameters(), strict=True):
                low.copy_(high)
        expected = squared_error(compute(x.bfloat16()), target)
        expected.backward()
        for low, high in zip(compute.parameters(), master.parameters(), strict=True):
            assert low.grad is not None
            high.grad, low.grad = low.grad.float(), None
        assert_exact(loss, expected, "loss")
        for name, p in model.named_parameters():
            assert isinstance(p.grad, DTensor)
            assert_exact(p.grad.to_local(), master.get_parameter(name).grad, name)
        ours.step()
        theirs.step()
        ours.zero_grad()
    for name, value in values_of(model).items():
        assert_exact(value, master.get_parameter(name).detach(), name)


@pytest.mark.behaviour("A-16")
def test_a_module_without_parameters_passes_gradients_through() -> None:
    module = fully_shard(nn.Tanh())
    for _ in range(2):
        x = torch.randn(2, 3, requires_grad=True)
        (actual,) = torch.autograd.grad(module(x).sum(), x)
        (expected,) = torch.autograd.grad(torch.tanh(x).sum(), x)
        assert_exact(actual, expected, "input gradient")
    assert list(module.parameters()) == []
    with torch.no_grad():
        module(torch.randn(2, 3))
    sharded(module).unshard()
    sharded(module).reshard()
    module.to(torch.float64)


@pytest.mark.behaviour("A-16")
def test_modules_without_parameters_anywhere_in_a_chain_train_with_parity() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Tanh(), nn.Linear(5, 7), nn.Dropout(0.0), nn.Linear(7, 3), nn.Identity())

    task = Task(seeded(build), TASK.batch, squared_error)
    model, reference = task.build(), task.build()
    for child in model.children():
        fully_shard(child)
    fully_shard(model)  # its own group has no parameters
    train_and_compare(model, reference, task, rtol=0, atol=0)


@pytest.mark.behaviour("A-16")
def test_a_module_with_only_frozen_or_ignored_parameters_is_accepted() -> None:
    model, reference = TASK.build(), TASK.build()
    for m in (model, reference):
        m.get_submodule("first").requires_grad_(False)
    ignored = set(model.get_submodule("second").parameters())
    fully_shard(model.get_submodule("second"), ignored_params=ignored)
    fully_shard(model, ignored_params=ignored)
    assert {p for p in model.parameters() if not isinstance(p, DTensor)} == ignored
    train_and_compare(model, reference, TASK, rtol=0, atol=0)


def on_meta() -> Spy:
    with torch.device("meta"):
        return Spy()


@pytest.mark.behaviour("A-12")
def test_a_forward_on_meta_parameters_names_them_and_the_remedy() -> None:
    model = on_meta()
    fully_shard(model.first)
    fully_shard(model)
    text = r"second\.weight.*second\.bias.*initialize\(model, seed=\.\.\.\).*to_empty\("
    with pytest.raises(ParameterError, match=text):
        model(torch.ones(2, 5))
    model.second.to_empty(device="cpu")
    with pytest.raises(ParameterError, match=r"'first' are still on the meta device: \['weight', 'bias'\]") as error:
        model(torch.ones(2, 5))
    assert "second" not in str(error.value)


@pytest.mark.behaviour("A-12")
def test_sharding_meta_parameters_allocates_nothing() -> None:
    with torch.device("meta"):
        model = nn.Linear(1 << 20, 1 << 20)  # 4 TiB
    fully_shard(model)
    assert isinstance(model.weight, DTensor)
    assert model.weight.to_local().is_meta


@pytest.mark.behaviour("A-12")
@pytest.mark.parametrize("through", ["to_empty", "assign"])
def test_parameters_from_meta_train_with_parity(through: str) -> None:
    model, reference = on_meta(), TASK.build()
    source = fully_shard(TASK.build())
    fully_shard(model.first)
    fully_shard(model)
    if through == "assign":
        model.load_state_dict(source.state_dict(), assign=True)
    else:
        model.to_empty(device="cpu")
        model.load_state_dict(source.state_dict())
    assert all(p.requires_grad and isinstance(p, DTensor) for p in model.parameters())
    train_and_compare(model, reference, TASK, rtol=0, atol=0)


@pytest.mark.behaviour("A-12")
def test_assigning_in_parts_works() -> None:
    model, reference = on_meta(), TASK.build()
    fully_shard(model)
    state = fully_shard(TASK.build()).state_dict()
    first = {name: value for name, value in state.items() if name.startswith("first")}
    model.load_state_dict(first, assign=True, strict=False)
    with pytest.raises(ParameterError, match=r"\['second\.weight', 'second\.bias'\]"):
        model(torch.ones(2, 5))
    rest = {name: value for name, value in state.items() if name not in first}
    model.load_state_dict(rest, assign=True, strict=False)
    train_and_compare(model, reference, TASK, rtol=0, atol=0)


def put(model: Spy, parameter: object) -> None:
    model.first._parameters["weight"] = parameter  # type: ignore[assignment]


@pytest.mark.behaviour("A-12", "H-02")
@pytest.mark.parametrize(
    "replace",
    [
        pytest.param(lambda m: put(m, nn.Parameter(torch.randn(7, 5))), id="parameter"),
        pytest.param(lambda m: setattr(m.first, "weight", nn.Parameter(torch.randn(7, 5))), id="setattr"),
        pytest.param(lambda m: put(m, None), id="none"),
        pytest.param(lambda m: delattr(m.first, "weight"), id="deleted"),
        pytest.param(lambda m: register_parametrization(m.first, "weight", nn.Identity()), id="parametrized"),
    ],
)
def test_a_parameter_replaced_by_a_plain_one_is_named_with_the_remedy(replace: Callable[[Spy], None]) -> None:
    model = TASK.build()
    assert isinstance(model, Spy)
    fully_shard(model)
    TASK.loss(model, TASK.batch_of(0, 0)).backward()
    replace(model)
    match = (
        r"'first\.weight' was replaced after sharding by a (Parameter|NoneType).*p\.copy_\(\.\.\.\).*before fully_shard"
    )
    with pytest.raises(ParameterError, match=match):
        model(torch.ones(2, 5))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@pytest.mark.behaviour("A-10", "A-12", "H-02")
def test_a_shared_parameter_replaced_under_its_second_name_is_noticed() -> None:
    model = Tied()
    fully_shard(model)
    model.second.weight = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(ParameterError, match=r"'first\.weight' was replaced after sharding by a Parameter"):
        model(torch.ones(2, 3))


@pytest.mark.behaviour("A-10", "A-12")
@pytest.mark.parametrize("kept", ["first.weight", "second.weight"])
def test_a_shared_parameter_can_be_assigned_under_either_name(kept: str) -> None:
    """Files that store a shared tensor once have only one of the names."""
    with torch.device("meta"):
        model = Tied()
    fully_shard(model)
    source = Tied()
    values = values_of(source)
    fully_shard(source)
    model.load_state_dict({kept: source.state_dict()[kept]}, assign=True, strict=False)
    assert model.first.weight is model.second.weight
    for name, value in values_of(model).items():
        assert_exact(value, values[name], name)
    model(torch.ones(2, 3)).sum().backward()


@pytest.mark.behaviour("A-12", "H-02")
def test_assigning_plain_tensors_on_meta_is_refused_by_name() -> None:
    model = fully_shard(TASK.build())
    values = TASK.build().state_dict() | {"first.weight": torch.empty(7, 5, device="meta")}
    with pytest.raises(ParameterError, match=r"'first\.weight' was replaced after sharding by a Parameter"):
        model.load_state_dict(values, assign=True)


@pytest.mark.behaviour("A-12", "H-02")
def test_a_dtensor_of_another_layout_is_refused_by_name() -> None:
    def build(size: int) -> nn.Module:
        return fully_shard(nn.Linear(size, 3))

    model, other = build(5), build(4)
    model.weight = other.weight
    with pytest.raises(ParameterError, match=r"'weight'.*DTensor of shape \(3, 4\).*expected shape \(3, 5\)"):
        model(torch.ones(2, 5))


CONVERSIONS: dict[str, tuple[Callable[[nn.Module], nn.Module], torch.dtype]] = {
    "to(float64)": (lambda m: m.to(torch.float64), torch.float64),
    "double": (lambda m: m.double(), torch.float64),
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16),
    "cpu": (lambda m: m.cpu(), torch.float32),
    "to(cpu, float64)": (lambda m: m.to("cpu", torch.float64), torch.float64),
    "_apply": (lambda m: m._apply(lambda t: t.clone()), torch.float32),
    "_apply mul": (lambda m: m._apply(lambda t: t * 2), torch.float32),
}


@pytest.mark.behaviour("A-18")
@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("moment", ["at rest", "unsharded", "with gradients"])
def test_conversions_between_steps_keep_training_with_the_same_optimizer(conversion: str, moment: str) -> None:
    convert, dtype = CONVERSIONS[conversion]
    model, reference = TASK.build(), TASK.build()
    fully_shard(model.get_submodule("first"))
    fully_shard(model)
    parameters = [id(p) for p in model.parameters()]
    optimizers = {m: sgd(m.parameters()) for m in (model, reference)}
    for m, optimizer in optimizers.items():
        TASK.loss(m, TASK.batch_of(0, 0)).backward()
        if moment == "unsharded" and isinstance(m, FSDPModule):
            m.unshard()
        if moment != "with gradients":
            optimizer.step()
            optimizer.zero_grad()
        convert(m)
        optimizer.step()
        optimizer.zero_grad()
    assert [id(p) for p in model.parameters()] == parameters
    assert {p.dtype for p in model.parameters()} == {dtype}
    for (name, value), expected in zip(values_of(model).items(), reference.parameters(), strict=True):
        assert_exact(value, expected.detach(), name)

    task = task_in(dtype)
    for step in range(2):
        losses = []
        for m, optimizer in optimizers.items():
            losses.append(task.loss(m, task.batch_of(step, 0)))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_exact(losses[0], losses[1], "loss")
    for (name, value), expected in zip(values_of(model).items(), reference.parameters(), strict=True):
        assert_exact(value, expected.detach(), name)


@pytest.mark.behaviour("A-18")
def test_a_plain_module_around_sharded_ones_converts_them() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).double()

    task = Task(seeded(build), task_in(torch.float64).batch, nn.functional.mse_loss)
    model, reference = task.build().float(), task.build().float().double()
    for child in model.children():
        fully_shard(child)
    model.to(torch.float64)
    train_and_compare(model, reference, task, rtol=0, atol=0)


@pytest.mark.behaviour("A-18", "D-03")
def test_converting_one_module_of_a_group_splits_its_transfers_and_trains() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).to(self.second.weight.dtype))

    task = Task(seeded(Mixed), TASK.batch, squared_error)
    model, reference = task.build(), task.build()
    fully_shard(model)
    train_and_compare(model, reference, task, steps=1, rtol=0, atol=0)
    for m in (model, reference):
        m.get_submodule("second").double()
    train_and_compare(model, reference, task, rtol=0, atol=0)


@pytest.mark.behaviour("A-18", "C-07")
@pytest.mark.parametrize("by_shards", [False, True])
def test_a_conversion_in_the_middle_of_an_accumulation_is_an_error(by_shards: bool) -> None:
    model = fully_shard(nn.Linear(2, 2))
    with no_sync(model, sharded=by_shards):
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(LifecycleError, match=r"holds gradients that were accumulated.*model\.zero_grad\(\)"):
        model.double()
    model.zero_grad()
    model.double()
    assert model.weight.dtype == torch.float64


@pytest.mark.behaviour("C-07", "C-09")
def test_a_setter_that_reallocates_keeps_accumulated_gradients() -> None:
    model: Any = fully_shard(nn.Linear(2, 2))
    with no_sync(model):
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(LifecycleError, match=r"holds gradients that were accumulated.*this change would lose"):
        model.set_reduce_scatter_unused_params(True)


class Inputs(nn.Module):
    """Applies a layer to the first input, adds the second, returns a view of the third, and does not use the last."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, y, z, left_out = inputs
        return torch.tanh(self.linear(x)) + y, x[:, :], z, left_out


@pytest.mark.behaviour("C-04", "C-06")
@pytest.mark.parametrize("wanted", ["all", "first", "second", "parameters"])
def test_the_backward_of_a_module_with_several_inputs_ends_with_the_last_gradient(wanted: str) -> None:
    """Gradients are correct, and parameters are resharded when backward leaves the module, in two backwards."""
    plain: Any = nn.Sequential(Inputs(), Inputs(), Inputs())
    model: Any = copy.deepcopy(plain)
    for part in model:
        fully_shard(part)
    fully_shard(model)
    found: list[list[torch.Tensor]] = []
    for each in (plain, model):
        leaves = [torch.full((2, 5), float(i), requires_grad=True) for i in range(4)]
        inputs = tuple(leaf * 2 for leaf in leaves)
        outputs = each(inputs)
        loss = outputs[0].sum() + outputs[1].square().sum()
        chosen = {"all": None, "first": leaves[:1], "second": leaves[1:2], "parameters": list(each.parameters())}
        if wanted == "parameters" and each is model:
            chosen["parameters"] = None  # the parameters in memory are other objects
        with Recorder() as events:
            for _ in range(2):
                loss.backward(retain_graph=True, inputs=chosen[wanted])
        if each is model and wanted == "all":
            names = [event.group for event in events if event.operation is Operation.RESHARD]
            assert names[:3] == ["2", "1", "0"]
        held = [*leaves, *each.parameters()]
        gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in held]
        kept = gradients[4:] if wanted == "parameters" else gradients[:4] if wanted != "all" else gradients
        found.append([torch.zeros(()) if gradient is None else gradient for gradient in kept])
    for ours, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, expected)
