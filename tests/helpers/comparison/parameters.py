"""Rows about parameters, resharding and modules."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from tests.helpers.comparison.rows import Library, batch, compare_gradients, row, seeded

SECTION = "Parameters and modules"


def full_value(parameter: Any) -> torch.Tensor:
    """Return the full values of a sharded parameter, on every rank."""
    return parameter.detach().full_tensor()


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))


def after_one_step(train: Callable[[nn.Module, torch.optim.Optimizer, int], None], model: nn.Module) -> str:
    """Return ``right`` if the next output of ``model`` equals that of an unsharded model after the same step."""
    reference = seeded(two_layers)
    train(model, torch.optim.SGD(model.parameters(), lr=0.5), dist.get_rank())
    for rank in range(dist.get_world_size()):
        (reference(batch(0, rank)).square().sum() / dist.get_world_size()).backward()
    torch.optim.SGD(reference.parameters(), lr=0.5).step()
    same = torch.allclose(model(batch(1, 0)), reference(batch(1, 0)), rtol=1e-4, atol=1e-5)
    return "right" if same else "wrong: output of old parameters"


@row(
    "The optimizer is built before `fully_shard`",
    torch="it updates nothing, silently",
    torch_reports=r"^nothing was updated",
    here="`ConfigurationError` at its first step; the message names a parameter",
    our_reports=r"^ConfigurationError: SGD was built before fully_shard",
    reason="A run that updates nothing should raise an error.",
)
def optimizer_before_sharding(library: Library, mesh: DeviceMesh) -> str:
    model = seeded(two_layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    library.fully_shard(model, mesh=mesh)
    return _stepped(model, optimizer)


@row(
    "The optimizer is built between forward and backward",
    torch="it gets the root's unsharded parameters and updates nothing, silently",
    torch_reports=r"^nothing was updated",
    here="`ConfigurationError` at its first step",
    our_reports=r"^ConfigurationError: SGD was built while parameters were unsharded",
    reason="A run that updates nothing should raise an error.",
)
def optimizer_between_forward_and_backward(library: Library, mesh: DeviceMesh) -> str:
    model = library.fully_shard(seeded(two_layers), mesh=mesh)
    loss = model(batch(0, 0)).sum()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss.backward()
    return _stepped(model, optimizer)


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    if all(p.grad is None for p in model.parameters()):
        model(batch(0, 0)).sum().backward()
    before = [full_value(p).clone() for p in model.parameters()]
    optimizer.step()
    after = [full_value(p) for p in model.parameters()]
    return "nothing was updated" if all(map(torch.equal, before, after)) else "right"


@row(
    "An evaluation runs between backward and the optimizer's step",
    torch="the root stays unsharded, and the next forward computes with old values",
    torch_reports=r"^wrong: output of old parameters",
    here="unsharded parameters are gathered again after an optimizer's step",
    reason="An evaluation may run at any point of a step.",
)
def evaluation_before_the_step(library: Library, mesh: DeviceMesh) -> str:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        model(batch(0, rank)).square().sum().backward()
        with torch.no_grad():
            model(batch(9, rank))
        optimizer.step()

    return after_one_step(train, library.fully_shard(seeded(two_layers), mesh=mesh))


@row(
    "`set_reshard_after_backward(False)`, then an optimizer's step without `reshard()`",
    torch="the next forward computes with old values",
    torch_reports=r"^wrong: output of old parameters",
    here="parameters are gathered again after an optimizer's step",
    reason="The setter saves an all-gather where it can, and never changes a result.",
)
def kept_after_backward(library: Library, mesh: DeviceMesh) -> str:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        model(batch(0, rank)).square().sum().backward()
        optimizer.step()

    model = library.fully_shard(seeded(two_layers), mesh=mesh)
    model.set_reshard_after_backward(False)
    return after_one_step(train, model)


@row(
    "`reshard_after_forward=2` on 4 ranks with uneven rows: `full_tensor()` between forward and backward",
    torch="wrong rows",
    torch_reports=r"wrong rows",
    here="the parameter's rows",
    reason="Registered parameters always show the parameter's values.",
    ranks=4,
)
def rows_on_a_smaller_mesh(library: Library, mesh: DeviceMesh) -> str:
    model: Any = nn.Sequential(seeded(lambda: nn.Linear(6, 5, bias=False)))
    before = model[0].weight.detach().clone()
    library.fully_shard(model[0], mesh=mesh, reshard_after_forward=2)
    library.fully_shard(model, mesh=mesh)
    loss = model(batch(0, 0)).sum()
    shown = model[0].weight.full_tensor()
    loss.backward()
    return "right" if shown.shape == before.shape and torch.equal(shown, before) else "wrong rows"


@row(
    "`Shard(1)` where the size does not divide by the number of ranks",
    torch="`NotImplementedError`",
    torch_reports=r"^NotImplementedError: FSDP does not support uneven sharding on dim 1",
    here="trains",
    reason="Uneven `Shard(0)` works, too.",
)
def uneven_columns(library: Library, mesh: DeviceMesh) -> str:
    model, reference = seeded(lambda: nn.Linear(7, 4)), seeded(lambda: nn.Linear(7, 4))
    library.fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    model(batch(0, dist.get_rank(), 7)).square().sum().backward()
    return compare_gradients(model, reference, lambda m, r: m(batch(0, r, 7)).square().sum())


@row(
    "`Shard(1)` and `reshard_after_forward=2` on 4 ranks, where the rows do not divide by 2",
    torch="raises on some ranks; the others hang",
    torch_reports=r"did not return in time",
    here="trains",
    reason="The two options are independent.",
    ranks=4,
)
def columns_on_a_smaller_mesh(library: Library, mesh: DeviceMesh) -> str:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 7, bias=False))

    model, reference = seeded(build), seeded(build)
    library.fully_shard(model[0], mesh=mesh, reshard_after_forward=2, shard_placement_fn=lambda p: Shard(1))
    library.fully_shard(model, mesh=mesh)
    model(batch(0, dist.get_rank(), 8)).square().sum().backward()
    return compare_gradients(model, reference, lambda m, r: m(batch(0, r, 8)).square().sum())


@row(
    "One rank",
    torch="the unsharded parameters are a second copy",
    torch_reports=r"^second copy$",
    here="the unsharded parameters are the shards' memory",
    our_reports=r"^same memory$",
    reason="A script that also runs on one device should not take twice the memory.",
    ranks=1,
)
def one_rank(library: Library, mesh: DeviceMesh) -> str:
    model = library.fully_shard(nn.Linear(4, 4), mesh=mesh)
    shard = model.weight.to_local().data_ptr()
    model.unshard()
    return "same memory" if model.weight.data_ptr() == shard else "second copy"


@row(
    "Attributes of a parameter, such as `p.is_embedding = True`",
    torch="lost",
    torch_reports=r"^lost",
    here="kept on the sharded and the unsharded parameter",
    reason="Optimizers and checkpoint code read such attributes.",
)
def attributes_of_parameters(library: Library, mesh: DeviceMesh) -> str:
    model: Any = nn.Linear(4, 4)
    model.weight.is_embedding = True
    library.fully_shard(model, mesh=mesh)
    sharded = hasattr(model.weight, "is_embedding")
    model.unshard()
    return "right" if sharded and hasattr(model.weight, "is_embedding") else "lost"


@row(
    "The first forward runs in `inference_mode`, and training follows",
    torch="training raises",
    torch_reports=r"^RuntimeError: Inference tensors cannot be saved for backward",
    here="trains",
    reason="Evaluating before training is common.",
)
def inference_mode_first(library: Library, mesh: DeviceMesh) -> str:
    model = library.fully_shard(seeded(two_layers), mesh=mesh)
    with torch.inference_mode():
        model(batch(0, 0))
    model(batch(0, dist.get_rank())).square().sum().backward()
    return compare_gradients(model, seeded(two_layers), lambda m, r: m(batch(0, r)).square().sum())


@row(
    "`model.forward(x)` instead of `model(x)`",
    torch="raises: mixed tensors and `DTensor`s",
    torch_reports=r"RuntimeError: .*mixed torch.Tensor and DTensor",
    here="the same as `model(x)`",
    reason="Subclasses and mixins call `forward` directly.",
)
def forward_called_directly(library: Library, mesh: DeviceMesh) -> str:
    model = library.fully_shard(seeded(lambda: nn.Linear(6, 6)), mesh=mesh)
    model.forward(batch(0, dist.get_rank())).square().sum().backward()
    reference = seeded(lambda: nn.Linear(6, 6))
    return compare_gradients(model, reference, lambda m, r: m(batch(0, r)).square().sum())


@row(
    "`copy.deepcopy` of a sharded module",
    torch="`AssertionError`",
    torch_reports=r"^AssertionError",
    here="a sharded copy that trains independently",
    reason="Averaged and teacher models are copies.",
)
def deep_copy(library: Library, mesh: DeviceMesh) -> str:
    model = copy.deepcopy(library.fully_shard(seeded(two_layers), mesh=mesh))
    model(batch(0, dist.get_rank())).square().sum().backward()
    return compare_gradients(model, seeded(two_layers), lambda m, r: m(batch(0, r)).square().sum())


@row(
    "One parameter in two groups (tied weights)",
    torch="found at the first forward",
    torch_reports=r"^found in forward",
    here="found by the second `fully_shard`; `policy=` or `shared_from=` lets groups share it",
    our_reports=r"^found in fully_shard",
    reason="The error comes where the mistake is.",
    since="2.13",
)
def one_parameter_in_two_groups(library: Library, mesh: DeviceMesh) -> str:
    model: Any = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = model[0].weight
    where = "fully_shard"
    try:
        for layer in model:
            library.fully_shard(layer, mesh=mesh)
        library.fully_shard(model, mesh=mesh)
        where = "forward"
        model(batch(0, 0))
    except ValueError:
        return f"found in {where}"
    return "not found"


@row(
    "Parameters that an evaluation left unsharded are halved in place, then `reshard()`",
    torch="the change is lost, silently",
    torch_reports=r"^changed nothing",
    here="the change holds, or is a `ParameterError` that names the parameter",
    our_reports=r"^halved",
    reason="Averages and clips of weights are written like this.",
)
def halved_after_an_evaluation(library: Library, mesh: DeviceMesh) -> str:
    model = library.fully_shard(nn.Sequential(nn.Linear(6, 6)), mesh=mesh, reshard_after_forward=False)
    before = model[0].weight.full_tensor().detach().clone()
    with torch.no_grad():
        model(batch(0, 0))
        model[0].weight.mul_(0.5)
    model.reshard()
    after = model[0].weight.full_tensor()
    return "halved" if torch.equal(after, before / 2) else "changed nothing" if torch.equal(after, before) else "wrong"


@row(
    "A forward changes an unsharded parameter in place",
    torch="the change is lost, silently",
    torch_reports=r"^changed nothing",
    here="`ParameterError` where ranks of one host share the memory of unsharded parameters; elsewhere it is lost, too",
    our_reports=r"^ParameterError: parameters \['0.weight'\] were changed in place while they were unsharded",
    reason="Other ranks would see the change. Detecting it elsewhere would cost a pass over all parameters.",
)
def in_place_change_of_an_unsharded_parameter(library: Library, mesh: DeviceMesh) -> str:
    class Clamped(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.zero_()
            return super().forward(x)

    model = library.fully_shard(nn.Sequential(Clamped(6, 6)), mesh=mesh)
    before = model[0].weight.full_tensor().clone()
    model(batch(0, 0)).sum().backward()
    return "changed nothing" if torch.equal(model[0].weight.full_tensor(), before) else "changed"


@row(
    "Parameters on the meta device; `to_empty`, then `reset_parameters()` with one seed on all ranks",
    torch="every rank draws the same values for its shard: the halves of the parameter are equal, silently",
    torch_reports=r"^equal shards",
    here="`ParameterError` at the first forward; `initialize(model, seed=...)` gives the values of the unsharded model",
    our_reports=r"^ParameterError: .*the same random values on ranks 0-1",
    reason="A model with repeated rows trains worse without an error.",
)
def equal_random_shards(library: Library, mesh: DeviceMesh) -> str:
    with torch.device("meta"):
        model = nn.Linear(16, 16)
    library.fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()
    model(batch(0, 0, 16)).sum().backward()
    first, second = full_value(model.weight).chunk(2)
    return "equal shards" if torch.equal(first, second) else "right"


@row(
    "Ranks build the model with different seeds",
    torch="trains a model with values of different ranks, silently",
    torch_reports=r"^trains",
    here="`DivergenceError` at the first forward; `sync_module_states=True` begins with rank 0's values",
    our_reports=r"^DivergenceError: ",
    reason="Torch seeds each process differently, so that a script without a seed has this fault.",
)
def different_starting_values(library: Library, mesh: DeviceMesh) -> str:
    torch.manual_seed(dist.get_rank())
    model = library.fully_shard(nn.Linear(16, 16), mesh=mesh)
    model(batch(0, 0, 16)).sum().backward()
    return "trains"


@row(
    "`p.data = value` on a sharded parameter",
    torch="ignored, silently",
    torch_reports=r"^ignored",
    here="`ParameterError` at the next forward; `p.copy_(value)` under `torch.no_grad()` works",
    our_reports=r"^ParameterError: parameters \['weight'\] of .* were given other values by p\.data",
    reason="The values of a `DTensor` are in its local tensor, which `p.data = value` does not change.",
)
def data_of_another_tensor(library: Library, mesh: DeviceMesh) -> str:
    model: Any = library.fully_shard(seeded(lambda: nn.Linear(6, 6)), mesh=mesh)
    before = model(batch(0, 0))
    model.reshard()
    model.weight.data = torch.zeros_like(model.weight)
    return "ignored" if torch.equal(model(batch(0, 0)), before) else "right"


@row(
    "The optimizer steps between a forward and its backward",
    torch="backward computes with the new parameters and the old activations, silently",
    torch_reports=r"^trains",
    here="`LifecycleError` in backward",
    our_reports=r"^LifecycleError: parameters of .* were changed in place between forward and backward",
    reason="Autograd raises for an unsharded model: a saved tensor was modified by an in-place operation.",
)
def step_between_forward_and_backward(library: Library, mesh: DeviceMesh) -> str:
    model = nn.Sequential(seeded(lambda: nn.Linear(6, 6)), nn.Linear(6, 6))
    for layer in model:
        library.fully_shard(layer, mesh=mesh)
    torch.manual_seed(2)
    library.fully_shard(model, mesh=mesh, reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(batch(0, 0)).sum().backward()
    loss = model(batch(0, 0)).sum()
    optimizer.step()
    loss.backward()
    return "trains"


@row(
    "BatchNorm with `param_dtype=torch.bfloat16`",
    torch="forward raises on CPU: the running statistics are fp32",
    torch_reports=r"RuntimeError: .*expected scalar type BFloat16 but found Float",
    here="its parameters compute in the dtype of the statistics; inputs and outputs stay bf16",
    reason="Statistics in bf16 would lose updates.",
)
def batch_norm_in_bf16(library: Library, mesh: DeviceMesh) -> str:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    policy = library.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    torch.manual_seed(1)
    library.fully_shard(model, mesh=mesh, mp_policy=policy)
    out = model(batch(0, dist.get_rank()))
    out.float().sum().backward()
    return "right" if out.dtype == torch.bfloat16 else f"wrong: {out.dtype}"


class Packed(nn.Parameter):
    """Values packed into bytes, and what is needed to unpack them, as in bitsandbytes' ``Params4bit``."""

    scale: float

    def __new__(cls, data: torch.Tensor, scale: float) -> Packed:
        packed = torch.Tensor._make_subclass(cls, data, False)
        packed.scale = scale
        return packed


class Unpacking(nn.Module):
    """A frozen layer of packed values, which checks their class, and an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Packed(torch.arange(36, dtype=torch.uint8).view(-1, 1), 0.5)
        self.adapter = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(self.weight, Packed):
            raise TypeError(f"the weight is a {type(self.weight).__name__}")
        values = self.weight.detach().view(6, 6) * self.weight.scale
        return self.adapter(x) + x @ values


@row(
    "A frozen parameter of a class that derives from `nn.Parameter`, such as bitsandbytes' `Params4bit`",
    torch="a plain `nn.Parameter` in forward, without the attributes of its class",
    torch_reports=r"^TypeError: the weight is a Parameter",
    here="in forward an instance of its class, with its attributes",
    reason="Quantized layers ask for the class and read the scales from it.",
    since="2.13",
)
def class_of_a_parameter(library: Library, mesh: DeviceMesh) -> str:
    model = library.fully_shard(seeded(Unpacking), mesh=mesh)
    model(batch(0, dist.get_rank())).square().sum().backward()
    return compare_gradients(model, seeded(Unpacking), lambda m, r: m(batch(0, r)).square().sum())


@row(
    "A model is dropped after a training step, and Python's garbage collector has not run",
    torch="all its modules are still in memory",
    torch_reports=r"^3 of 3 modules are left",
    here="no module is in memory",
    our_reports=r"^0 of 3 modules are left",
    reason="Reference cycles keep the memory of shards until the collector runs, on a GPU too.",
)
def dropped_model(library: Library, mesh: DeviceMesh) -> str:
    def trained() -> list[weakref.ref[nn.Module]]:
        model = two_layers()
        torch.manual_seed(1)
        for module in (*model.children(), model):
            library.fully_shard(module, mesh=mesh)
        model(batch(0, dist.get_rank())).sum().backward()
        return [weakref.ref(module) for module in model.modules()]

    trained()  # memory that a library keeps from its first use is not counted
    gc.collect()
    gc.disable()
    try:
        modules = trained()
        return f"{sum(module() is not None for module in modules)} of {len(modules)} modules are left"
    finally:
        gc.enable()


@row(
    "`TORCH_LOGS=+fsdp` shows a step",
    torch="`root_pre_forward`, `pre_forward`, `post_forward`, `pre_backward`, `post_backward` and `root_post_backward`",
    torch_reports=r"^post_backward, post_forward, pre_backward, pre_forward, root_post_backward, root_pre_forward\b",
    here="the labels of torch's profiles: `all_gather` and others too; not `root_pre_forward`; `post_backward_reduce` "
    "for `post_backward`, `root_post_backward_callback` for `root_post_backward`. The root, which has no name in "
    "torch's lines, is `(root)`",
    our_reports=r"^all_gather, all_gather_copy_out, post_backward_reduce, (post_backward_rs_wait, )?post_forward, "
    r"pre_backward, pre_forward, root_post_backward_callback\b",
    reason="A log and a profile of one step have the same labels, and the log shows collectives.",
)
def lines_of_the_log(library: Library, mesh: DeviceMesh) -> str:
    words = set()

    class Words(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            words.add(record.getMessage().removeprefix("FSDP::").partition(" ")[0])

    model: Any = seeded(two_layers)
    for module in (*model.children(), model):
        library.fully_shard(module, mesh=mesh)
    model(batch(0, 0)).sum().backward()
    log, handler = logging.getLogger("torch.distributed.fsdp.fully_shard"), Words()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        model(batch(0, 0)).sum().backward()
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
    return ", ".join(sorted(words))


@row(
    "A parameter that is not contiguous, such as the weight of a convolution in `channels_last`",
    torch="`NotImplementedError`",
    torch_reports=r"^NotImplementedError: FSDP does not support non-contiguous parameters",
    here="trains; the parameter is contiguous from then on",
    reason="Sharding copies the values anyway.",
)
def not_contiguous(library: Library, mesh: DeviceMesh) -> str:
    def build() -> nn.Module:
        return nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def loss(module: nn.Module, rank: int) -> torch.Tensor:
        output: torch.Tensor = module(batch(0, rank, 48).view(3, 3, 4, 4))
        return output.square().sum()

    model, reference = seeded(build), seeded(build)
    library.fully_shard(model, mesh=mesh)
    loss(model, dist.get_rank()).backward()
    return compare_gradients(model, reference, loss)


def trained_twice(model: nn.Module, first: nn.Module) -> str:
    """Return the comparison of the gradients of ``model`` after a forward of ``first``, a part of it."""
    rank, reference = dist.get_rank(), seeded(two_layers)
    with torch.no_grad():
        first(batch(1, rank))
    model(batch(0, rank)).square().sum().backward()
    return compare_gradients(model, reference, lambda m, r: m(batch(0, r)).square().sum())


@row(
    "A mesh of two dims without names",
    torch="`AssertionError`",
    torch_reports=r"^AssertionError: Please init the 2D mesh for HSDP with mesh_dim_names",
    here="trains; the first dim replicates",
    reason="The order of the dims has one meaning.",
)
def mesh_without_names(library: Library, mesh: DeviceMesh) -> str:
    model = seeded(two_layers)
    return trained_twice(library.fully_shard(model, mesh=init_device_mesh("cpu", (1, 2))), model)


@row(
    "A part of the model runs forward before the whole model does so for the first time",
    torch="`RuntimeError` at the forward of the model",
    torch_reports=r"^RuntimeError: FSDP state has already been lazily initialized for 0",
    here="trains; the model is the root from then on",
    reason="An encoder may compute embeddings before training.",
)
def part_runs_first(library: Library, mesh: DeviceMesh) -> str:
    model = seeded(two_layers)
    for module in (model[0], model):
        library.fully_shard(module, mesh=mesh)
    return trained_twice(model, model[0])


@row(
    "A list of modules in one group, without a sharded module around them",
    torch="`RuntimeError`: it requires a single root module",
    torch_reports=r"^RuntimeError: FSDP requires a single root module",
    here="trains",
    reason="The end of a backward needs no module around the group.",
)
def list_without_a_root(library: Library, mesh: DeviceMesh) -> str:
    model = seeded(two_layers)
    library.fully_shard([model[0], model[1]], mesh=mesh)
    return trained_twice(model, model[0])
