"""Invalid calls of ``fully_shard`` raise errors and leave the module unchanged."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor

from composable_fsdp import (
    CommunicationPolicy,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from composable_fsdp.errors import ArgumentTypeError, ConfigurationError, MeshError, ParameterError, UnsupportedError
from tests._internals import default_mesh
from tests.helpers.fresh_process import run_program
from tests.helpers.refusals import assert_refused
from tests.helpers.sharding import sharded

pytestmark = [pytest.mark.behaviour("A-08"), pytest.mark.usefixtures("one_rank")]


class WithScalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


class Blocks(Shard):
    """A placement with another layout than that of ``Shard``, as ``BlockShard`` of torch's main branch."""


class Borrowed(TwoTensor):
    """A tensor as those of torch's main branch that are used without an all-gather on one rank."""

    def fsdp_get_unsharded_view(self, *_: object) -> torch.Tensor | None:
        return self


class Declining(Borrowed):
    """A tensor that has no view of itself."""

    def fsdp_get_unsharded_view(self, *_: object) -> None:
        return None


class Unwilling(nn.Linear):
    """A class that does not allow subclasses."""

    def __init_subclass__(cls) -> None:
        raise TypeError("Unwilling cannot have subclasses")


@pytest.mark.multiprocess
@pytest.mark.behaviour("A-03")
def test_without_a_process_group_the_error_says_how_to_start_one() -> None:
    """The test starts a process in which no process group was ever initialised."""
    code = """
import torch, composable_fsdp
model = torch.nn.Linear(2, 2)
try:
    composable_fsdp.fully_shard(model)
except composable_fsdp.errors.MeshError as error:
    assert type(model) is torch.nn.Linear and type(model.weight) is torch.nn.Parameter
    assert isinstance(error, ValueError)
    print(error)
"""
    run = run_program(code)
    assert run.returncode == 0, run.stderr
    for part in ("no mesh", "no default process group", "torchrun", "init_process_group", "init_device_mesh", "mesh="):
        assert part in run.stdout, run.stdout
    assert "the environment, which lacks RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT." in run.stdout


@pytest.mark.behaviour("A-03")
def test_the_default_mesh_is_one_1d_unnamed_cpu_mesh_for_all_modules() -> None:
    first, second = fully_shard(nn.Linear(2, 2)), fully_shard(nn.Linear(2, 2))
    assert isinstance(first.weight, DTensor)
    assert isinstance(second.weight, DTensor)
    mesh = first.weight.device_mesh
    assert second.weight.device_mesh is mesh
    assert (mesh.device_type, tuple(mesh.shape), mesh.mesh_dim_names) == ("cpu", (1,), None)
    assert default_mesh() is default_mesh()


@pytest.mark.behaviour("A-04")
@pytest.mark.parametrize("nested", [False, True], ids=["own", "of a child"])
def test_a_scalar_is_named_with_the_remedy(nested: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), WithScalar()) if nested else WithScalar()
    name = r"'1\.scale'" if nested else "'scale'"
    match = rf"(?s){name}.*scalar \(0-d\).*reshape\(1\).*ignored_params"
    assert_refused(ParameterError, match, model)


@pytest.mark.behaviour("A-04", "A-11")
def test_both_remedies_for_a_scalar_work_after_it_was_refused() -> None:
    ignoring, reshaped = WithScalar(), WithScalar()
    for model in (ignoring, reshaped):
        assert_refused(ParameterError, "scale", model)
    scale = ignoring.scale
    fully_shard(ignoring, ignored_params={scale})
    assert ignoring.scale is scale
    reshaped.scale = nn.Parameter(reshaped.scale.detach().reshape(1))
    fully_shard(reshaped)
    for model in (ignoring, reshaped):
        model(torch.ones(2, 3)).sum().backward()
        assert model.scale.grad is not None
        assert all(isinstance(p, DTensor) for p in model.parameters() if p is not scale)


@pytest.mark.behaviour("A-17")
def test_an_uninitialized_parameter_is_named_with_the_remedy() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(4))
    assert_refused(ParameterError, r"'1\.weight' of Sequential has no shape yet.*a forward before fully_shard", model)
    model(torch.ones(2, 3))
    fully_shard(model)
    model(torch.ones(2, 3)).sum().backward()


@pytest.mark.behaviour("A-05")
@pytest.mark.parametrize("dim", [2, -3])
def test_a_dim_out_of_range_is_named_with_those_in_range(dim: int) -> None:
    def placement(parameter: nn.Parameter) -> Shard | None:
        return Shard(dim) if parameter.ndim == 2 else None

    match = rf"'0\.weight' of shape \(4, 3\) has no dim {dim}.*Shard\(d\) with -2 <= d < 2"
    assert_refused(ParameterError, match, nn.Sequential(nn.Linear(3, 4)), shard_placement_fn=placement)


@pytest.mark.behaviour("A-05")
@pytest.mark.parametrize("answer", [0, "Shard(0)", Replicate(), Partial(), (Shard(0),), Blocks(0)], ids=repr)
def test_a_placement_other_than_shard_is_shown_in_the_error(answer: object) -> None:
    match = r"shard_placement_fn returned .*'bias'.*must return Shard\(dim\), a ShardPlacementResult, or None"
    assert_refused(
        ConfigurationError, match, nn.Linear(3, 4), shard_placement_fn=lambda p: answer if p.ndim == 1 else None
    )


@pytest.mark.behaviour("A-05")
def test_an_exception_of_the_placement_function_passes_through() -> None:
    def placement(parameter: nn.Parameter) -> Shard:
        raise LookupError("raised by the test")

    assert_refused(LookupError, "raised by the test", nn.Linear(3, 4), shard_placement_fn=placement)


@pytest.mark.behaviour("A-07")
def test_a_3d_mesh_is_refused_and_the_error_shows_how_to_slice_it() -> None:
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp", "replicate", "shard"))
    match = r"1-d \(shard\) or 2-d \(replicate, shard\), not 3-d \(1, 1, 1\).*mesh\['replicate', 'shard'\]"
    assert_refused(MeshError, match, nn.Linear(3, 4), mesh=mesh)
    fully_shard(nn.Linear(3, 4), mesh=mesh["replicate", "shard"])


@pytest.mark.behaviour("A-07")
@pytest.mark.parametrize("mesh", ["cpu", (2, 2), "the process group"])
def test_a_mesh_of_a_wrong_type_is_refused(mesh: object) -> None:
    mesh = dist.group.WORLD if mesh == "the process group" else mesh
    match = rf"mesh must be a torch\.distributed\.DeviceMesh, not {type(mesh).__name__}.*init_device_mesh"
    assert_refused(ArgumentTypeError, match, nn.Linear(3, 4), mesh=mesh)


def test_a_second_fully_shard_of_a_module_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    fully_shard(model[0])
    fully_shard(model)
    assert_refused(ConfigurationError, "applied to this Linear already.*once.*bottom-up", model[0], within=model)
    assert_refused(ConfigurationError, "applied to this Sequential already", model)


@pytest.mark.parametrize("value", [None, torch.ones(2), nn.Parameter(torch.ones(2)), "model", nn.Linear], ids=type)
def test_a_module_of_a_wrong_type_is_refused(value: object) -> None:
    assert_refused(ConfigurationError, f"takes an nn.Module or a list of them, not {type(value).__name__}", value)


@pytest.mark.behaviour("A-06")
def test_parameters_with_spmd_types_need_the_mesh_of_all_axes_or_are_ignored() -> None:
    linear: Any = nn.Linear(3, 3)
    linear.weight._local_type = {"tp": "R"}  # as spmd_types.assert_type does, by its own types
    match = r"'weight' of Linear has types of the package spmd_types.*would not be summed.*Pass that mesh and dp_m.*ig"
    assert_refused(ParameterError, match, linear)
    linear.bias._local_type = {}  # without a type
    fully_shard(linear, ignored_params={linear.weight})


@pytest.mark.parametrize(
    "container",
    [
        nn.ModuleList([nn.Linear(3, 3)]),
        nn.ModuleDict({"a": nn.Linear(3, 3)}),
        nn.ParameterList([torch.ones(3)]),
        nn.ParameterDict({"a": torch.ones(3)}),
    ],
    ids=lambda container: type(container).__name__,
)
def test_a_container_without_forward_is_refused(container: nn.Module) -> None:
    match = rf"{type(container).__name__} has no forward.*on each module in it, or on the module that contains it"
    assert_refused(ConfigurationError, match, container)


def test_a_container_with_its_own_forward_is_accepted() -> None:
    class Chain(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for module in self:
                x = module(x)
            return x

    patched = nn.ModuleList([nn.Linear(3, 3)])
    patched.forward = types.MethodType(Chain.forward, patched)
    for container in (Chain([nn.Linear(3, 3)]), patched):
        fully_shard(container)
        container(torch.ones(1, 3)).sum().backward()
        assert all(isinstance(p, DTensor) and p.grad is not None for p in container.parameters())


@pytest.mark.behaviour("C-08")
def test_a_module_without_forward_works_through_its_registered_methods() -> None:
    class Codec(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    module = Codec()
    fully_shard(module)
    register_fsdp_forward_method(module, "encode")
    module.encode(torch.ones(1, 3)).sum().backward()
    assert all(isinstance(p, DTensor) and p.grad is not None for p in module.parameters())


@pytest.mark.behaviour("A-09")
@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_that_makes_no_group_is_refused(kind: Callable[[Any], Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    assert_refused(ConfigurationError, "empty list of modules", kind([]))
    assert_refused(ConfigurationError, "the same module twice", kind([model[0], model[0]]), within=model)
    assert_refused(ConfigurationError, "or a list of them, not str", kind([model[0], "1"]), within=model)


@pytest.mark.parametrize("ran", [False, True], ids=["before a forward", "after a forward"])
def test_a_child_after_its_parent_is_refused_naming_both(ran: bool) -> None:
    class Outer(nn.Sequential):
        pass

    class Inner(nn.Sequential):
        pass

    inner = Inner(nn.Linear(3, 3))
    outer = fully_shard(Outer(inner))
    if ran:
        outer(torch.ones(1, 3)).sum().backward()
    match = r"parameter '0\.weight' of Inner already belongs.*bottom-up.*on Inner first, then on the \w*Outer"
    assert_refused(ConfigurationError, match, inner, within=outer)
    outer(torch.ones(1, 3)).sum().backward()


def test_a_child_while_its_parent_is_unsharded_is_refused() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(3, 3)))
    sharded(model).unshard()
    assert_refused(ConfigurationError, "already belongs to the group of", model[0], within=model)


def test_a_parent_group_has_the_parameters_of_no_earlier_call() -> None:
    innermost = nn.Linear(3, 3)
    inner = nn.Sequential(innermost, nn.Linear(3, 3))
    model = nn.Sequential(nn.Linear(3, 3), inner, nn.Linear(3, 3))
    fully_shard(innermost)
    fully_shard(inner)
    taken = {id(p) for p in inner.parameters()}
    assert all(isinstance(p, DTensor) for p in inner.parameters())
    assert not any(isinstance(p, DTensor) for i in (0, 2) for p in model[i].parameters())
    fully_shard(model)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert {id(p) for p in inner.parameters()} == taken

    def unsharded() -> list[str]:
        return [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]

    sharded(model).unshard()
    assert unsharded() == ["0.weight", "0.bias", "2.weight", "2.bias"]
    sharded(model).reshard()
    sharded(inner).unshard()
    assert unsharded() == ["1.1.weight", "1.1.bias"]
    sharded(inner).reshard()
    sharded(innermost).unshard()
    assert unsharded() == ["1.0.weight", "1.0.bias"]


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


@pytest.mark.behaviour("A-10")
def test_a_parameter_shared_with_another_group_is_refused_naming_both() -> None:
    model = TiedHead()
    fully_shard(model.embedding)
    match = r"'head\.weight' of TiedHead is the same tensor as 'weight' of Embedding.*one group.*leave out fully_shard"
    assert_refused(ParameterError, match, model)
    match = "'weight' of Linear is the same tensor as 'weight' of Embedding"
    assert_refused(ParameterError, match, model.head, within=model)
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    fully_shard(first)
    assert_refused(ParameterError, "'weight' of Linear is the same tensor as 'weight' of Linear", second)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"reshard_after_forward": 2}, r"reshard_after_forward=2 does not divide.*1 ranks"),
        ({"reshard_after_forward": "yes"}, r"must be True, False, None or an int, not 'yes'"),
        ({"mp_policy": torch.bfloat16}, "mp_policy must be a MixedPrecisionPolicy, not dtype"),
        ({"mp_policy": None}, "mp_policy must be a MixedPrecisionPolicy, not NoneType"),
        ({"mp_policy": {"": MixedPrecisionPolicy()}}, "mp_policy must be a MixedPrecisionPolicy, not dict"),
        (
            {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=lambda _: torch.float16)},
            r"param_dtype_override_fn returned torch\.float16 for parameter 'weight'; it must return None, param_dtype "
            r"\(torch\.bfloat16\), or the parameter's original dtype \(torch\.float32\)\.",
        ),
        (
            {
                "mp_policy": MixedPrecisionPolicy(param_dtype_override_fn=cast(Any, lambda _: "float32")),
                "policy": {nn.Linear},
            },
            "param_dtype_override_fn returned 'float32' for parameter 'weight'",
        ),
        ({"offload_policy": True}, "offload_policy must be an OffloadPolicy or None, not bool"),
        ({"offload_policy": MixedPrecisionPolicy()}, "offload_policy must be an OffloadPolicy or None, not Mixed"),
        (
            {"offload_policy": {"wieght": CPUOffloadPolicy()}},
            r"\['wieght'\], which no parameter of this call is named.*earlier calls took.*: \['weight', 'bias'\]",
        ),
        (
            {"offload_policy": {"0.weight": CPUOffloadPolicy()}, "policy": {nn.Linear}},
            r"\['0.weight'\], which are not among the names of model.named_parameters",
        ),
        ({"offload_policy": {"weight": True}}, "offload_policy must be an OffloadPolicy or None, not bool"),
        ({"mp_policy": CPUOffloadPolicy()}, "mp_policy must be a MixedPrecisionPolicy, not CPUOffload"),
    ],
    ids=lambda value: re.sub(r" at 0x\w+", "", repr(value)),  # the same in each process
)
def test_a_wrong_option_is_refused(options: dict[str, Any], match: str) -> None:
    assert_refused(ConfigurationError, match, nn.Linear(3, 3), **options)


@pytest.mark.behaviour("A-01")
def test_a_final_class_is_refused_without_side_effects() -> None:
    assert_refused(TypeError, "Unwilling cannot have subclasses", Unwilling(3, 3))


@pytest.mark.behaviour("A-10")
@pytest.mark.parametrize("cause", ["a scalar", "a buffer on meta", "a final class"])
def test_a_refused_user_keeps_the_parameters_that_others_own(cause: str) -> None:
    model, owner = WithScalar(), nn.Linear(3, 3)
    model.linear.weight = owner.weight
    fully_shard(owner)
    scalar = {model.scale}
    if cause == "a scalar":
        assert_refused(ParameterError, "scale", model, shared_from=[owner])
    elif cause == "a buffer on meta":
        model.register_buffer("mask", torch.ones(1, device="meta"))
        options: dict[str, Any] = {"sync_module_states": True, "ignored_params": scalar, "shared_from": [owner]}
        assert_refused(ParameterError, "mask", model, **options)
    else:
        modules = [model, Unwilling(3, 3)]
        assert_refused(TypeError, "cannot have", modules, within=model, ignored_params=scalar, shared_from=[owner])
    fully_shard(model, ignored_params=scalar, shared_from=[owner])
    assert model.linear.weight is owner.weight


def test_symmetric_memory_is_said_to_have_no_effect_once(caplog: pytest.LogCaptureFixture) -> None:
    for backend in ((), ("NCCL",)):
        model = fully_shard(nn.Linear(3, 3))
        assert isinstance(model, FSDPModule)
        model.set_symm_mem_for_comm(*backend)
        model.set_symm_mem_for_comm(*backend)
    (message,) = [text for text in caplog.messages if "symm_mem" in text]
    assert message.startswith("set_symm_mem_for_comm has no effect in this version: messages are in ordinary memory.")
    assert "set_allocate_memory_from_process_group_for_comm()" in message
    fully_shard(nn.Linear(3, 3))(torch.ones(1, 3)).sum().backward()


def test_a_tensor_that_only_brings_a_view_is_refused_unless_it_is_frozen_and_makes_one() -> None:
    match = "^parameter 'weight' is a Borrowed with fsdp_get_unsharded_view, which serves frozen parameters on one rank"
    for tensor, is_frozen in ((Borrowed, False), (Declining, True)):
        model = nn.Linear(3, 3)
        weight = tensor(model.weight.detach(), model.weight.detach().clone())
        model.weight = nn.Parameter(weight, requires_grad=not is_frozen)
        assert_refused(ParameterError, match.replace("Borrowed", tensor.__name__), model)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("auto_wrap_policy", "Pass policy=, which takes ModuleWrapPolicy, CustomPolicy, and {Block}"),
        ("sharding_strategy", "Pass strategy=, which takes the same names"),
        ("mixed_precision", r"Pass mp_policy=MixedPrecisionPolicy\(\.\.\.\)"),
        ("cpu_offload", r"Pass offload_policy=CPUOffloadPolicy\(\)"),
        ("device_id", "Pass device="),
        ("device_mesh", "Pass mesh="),
        ("process_group", r"Pass mesh=DeviceMesh.from_group\(process_group, device_type\)"),
        ("ignored_states", "Pass ignored_params= or ignored_modules="),
        ("use_orig_params", "Leave it out: optimizers always see one parameter for each of the module's"),
        ("backward_prefetch", r"Leave it out: backward prefetches, and set_schedule\(prefetch_limit=n\) says how far"),
        ("forward_prefetch", r"Leave it out: forward prefetches, and set_schedule\(prefetch_limit=n\) says how far"),
        ("limit_all_gathers", r"Leave it out: set_schedule\(prefetch_limit=n\) limits them"),
    ],
)
def test_an_argument_of_fsdp1_names_its_replacement(name: str, advice: str) -> None:
    options: dict[str, Any] = {name: None}
    text = rf"^fully_shard\(\) got an unexpected keyword argument '{name}': it is FSDP1's. {advice}\.$"
    for policy in (None, {nn.Linear}):
        model = nn.Sequential(nn.Linear(3, 3))
        with pytest.raises(ArgumentTypeError, match=text):
            fully_shard(model, policy=policy, **options)
        assert type(model[0]) is nn.Linear
    assert name not in inspect.signature(fully_shard).parameters
    assert name in inspect.signature(FullyShardedDataParallel).parameters


@pytest.mark.parametrize(
    ("call", "name", "meant"),
    [
        (partial(fully_shard, nn.Linear(3, 3)), "reshard_after_fwd", "reshard_after_forward"),
        (MixedPrecisionPolicy, "param_dtyp", "param_dtype"),
        (CPUOffloadPolicy, "pinmemory", "pin_memory"),
        (CommunicationPolicy, "allgather", "all_gather"),
        (DataParallelMeshDims, "shards", "shard"),
    ],
)
def test_an_unknown_keyword_names_the_one_that_was_meant(call: Callable[..., Any], name: str, meant: str) -> None:
    text = rf"\(\) got an unexpected keyword argument '{name}'\. Did you mean '{meant}'\?$"
    with pytest.raises(ArgumentTypeError, match=text):
        call(**{name: None})
    assert meant in inspect.signature(call).parameters
    assert name not in inspect.signature(call).parameters


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy, TorchMixedPrecisionPolicy])
@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype", "output_dtype"])
def test_a_dtype_that_is_a_text_or_an_integer_dtype_is_refused(policy: Any, name: str) -> None:
    text = rf"^{name} must be a torch.dtype such as torch.bfloat16, not 'bf16'\.$"
    with pytest.raises(ArgumentTypeError, match=text):
        fully_shard(nn.Linear(3, 3), mp_policy=policy(**{name: "bf16"}))
    text = rf"^{name} must be a floating-point dtype, not torch.int8\. .* pass comm_policy="
    with pytest.raises(ConfigurationError, match=text):
        fully_shard(nn.Linear(3, 3), mp_policy=policy(**{name: torch.int8}))


def test_a_dtype_of_gradients_that_is_not_real_is_refused_and_that_of_torchs_policy_is_read() -> None:
    for dtype in (torch.int64, torch.bool, torch.complex64):
        with pytest.raises(ConfigurationError, match=f"^grad_dtype must be a floating-point dtype, not {dtype}"):
            MixedPrecisionPolicy(grad_dtype=dtype)
    with pytest.raises(ArgumentTypeError, match=r"^grad_dtype must be a torch\.dtype .* not 'float32'"):
        MixedPrecisionPolicy(grad_dtype="float32")  # type: ignore[arg-type]
    assert MixedPrecisionPolicy(torch.bfloat16, torch.float32, None, False).grad_dtype is None

    @dataclass(frozen=True)
    class Later(TorchMixedPrecisionPolicy):
        """torch's policy with the field of its pull request 197368."""

        grad_dtype: torch.dtype | None = None

    layer = nn.Linear(3, 3, dtype=torch.bfloat16)
    layer.bias.grad_dtype = None
    model = fully_shard(layer, mp_policy=cast(Any, Later(grad_dtype=torch.float32)))
    assert (model.weight.grad_dtype, model.bias.grad_dtype) == (torch.float32, None)


def test_a_function_of_torchs_policy_is_read_and_a_field_that_is_not_known_is_refused() -> None:
    @dataclass(frozen=True)
    class Later(TorchMixedPrecisionPolicy):
        """torch's policy with the field of torch 2.15, and one of next year."""

        param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = None
        of_next_year: tuple[int, ...] = ()

    def original(parameter: nn.Parameter) -> torch.dtype | None:
        return parameter.dtype if parameter.ndim == 1 else None

    later: Any = partial(Later, torch.bfloat16, param_dtype_override_fn=original)
    model = fully_shard(nn.Linear(3, 3), mp_policy=later())
    cast(Any, model).unshard()
    assert (model.weight.dtype, model.bias.dtype) == (torch.bfloat16, torch.float32)
    text = r"^mp_policy has of_next_year=\(1,\), which is not supported for Later in this version\. Leave it out\.$"
    with pytest.raises(UnsupportedError, match=text):
        fully_shard(nn.Linear(3, 3), mp_policy=later(of_next_year=(1,)))
