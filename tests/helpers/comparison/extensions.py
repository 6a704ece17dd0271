"""Rows about all-gather extensions and other tensor subclasses."""

from __future__ import annotations

import shutil
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp.checkpoint import load, save
from tests.helpers.comparison.rows import LIBRARIES, Library, batch, compare_gradients, row, seeded
from tests.helpers.extension_tensors import Pair

SECTION = "All-gather extensions"


def hang_hooks(parameter: Any, pre: Any, post: Any) -> None:
    """Add all-gather hooks to the local tensor of a sharded parameter."""
    local = parameter._local_tensor
    local.fsdp_pre_all_gather = types.MethodType(pre, local)
    local.fsdp_post_all_gather = types.MethodType(post, local)


def send_halves(self: torch.Tensor, mesh: DeviceMesh) -> Any:
    return (self * 0.5, self * 0.25), None


def add_halves(self: torch.Tensor, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
    half, quarter = outputs
    total = half + quarter + quarter
    if out is not None:
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(total)
        return None
    return total, (total,)


def send_bf16(self: torch.Tensor, mesh: DeviceMesh) -> Any:
    return (self.bfloat16(),), None


def take_bf16(self: torch.Tensor, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
    (gathered,) = outputs
    if out is not None:
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(gathered)
        return None
    full = gathered.to(dtype)
    return full, (full,)


def take_bf16_with_gradients(self: torch.Tensor, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
    if out is None:
        return take_bf16(self, outputs, metadata, dtype)
    out.copy_(outputs[0])
    return None


def trained(library: Library, mesh: DeviceMesh, rows: int, pre: Any, post: Any, **options: Any) -> str:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, rows, bias=False), nn.Tanh())

    model, reference = seeded(build), seeded(build)
    library.fully_shard(model[0], mesh=mesh, **options)
    library.fully_shard(model, mesh=mesh)
    hang_hooks(model[0].weight, pre, post)
    for step in range(2):
        model.zero_grad()
        model(batch(step, dist.get_rank())).sum().backward()
    return compare_gradients(model, reference, lambda m, r: m(batch(1, r)).sum(), rtol=2e-2, atol=2e-2)


@row(
    "`fsdp_pre_all_gather` sends several tensors, on one rank",
    torch='"not enough values to unpack"',
    torch_reports=r"^ValueError: not enough values to unpack",
    here="trains",
    reason="The protocol allows several tensors on any number of ranks.",
    ranks=1,
)
def several_inputs_on_one_rank(library: Library, mesh: DeviceMesh) -> str:
    return trained(library, mesh, 4, send_halves, add_halves)


@row(
    "Uneven rows, and an input that is not padded",
    torch="message sizes differ between ranks: gloo aborts the process",
    torch_reports=r"died of SIGABRT",
    here="trains: the library pads",
    reason="The hook cannot know the padding that a transport needs.",
)
def unpadded_input(library: Library, mesh: DeviceMesh) -> str:
    return trained(library, mesh, 5, send_bf16, take_bf16)


@row(
    "`fsdp_post_all_gather` writes to `out` without `torch.no_grad()`",
    torch="raises in forward: `out` is a leaf that requires gradients",
    torch_reports=r"RuntimeError: a leaf Variable that requires grad is being used in an in-place operation",
    here="trains: hooks run without gradients",
    reason="Filling a buffer is not part of the graph.",
)
def out_filled_with_gradients_enabled(library: Library, mesh: DeviceMesh) -> str:
    return trained(library, mesh, 4, send_bf16, take_bf16_with_gradients)


@row(
    "torchao's int8 weights with rows that do not divide by the number of ranks",
    torch="raises on the rank with fewer rows; the others hang",
    torch_reports=r"Timed out.*fsdp_pre_all_gather must return all-gather inputs with the padded sharded size",
    here="trains",
    reason="A vocabulary or a hidden size need not divide by the number of ranks.",
    needs="torchao",
)
def quantized_rows_that_do_not_divide(library: Library, mesh: DeviceMesh) -> str:
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training
    from torchao.quantization import quantize_

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(64, 63, bias=False))
        quantize_(model, int8_weight_only_quantized_training())
        return model

    model, reference = seeded(build), seeded(build)
    library.fully_shard(model[0], mesh=mesh)
    library.fully_shard(model, mesh=mesh)

    def loss(m: nn.Module, rank: int) -> torch.Tensor:
        return m(batch(0, rank, 64)).square().sum()

    loss(model, dist.get_rank()).backward()
    return compare_gradients(model, reference, loss, rtol=1e-4, atol=1e-4)


def forget_out(self: torch.Tensor, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
    full = outputs[0].to(dtype)
    return full, (full,)


@row(
    "`fsdp_post_all_gather` ignores `out` at the second gather",
    torch="the parameter has uninitialized values",
    torch_reports=r"^wrong|nan",
    here="`ParameterError` that names the parameter and the class",
    our_reports=r"^ExtensionError|^ParameterError",
    reason="Uninitialized memory gives NaN, or wrong values without an error.",
)
def out_ignored(library: Library, mesh: DeviceMesh) -> str:
    return trained(library, mesh, 64, send_bf16, forget_out)


class Uncut(torch.Tensor):
    """A tensor class that does not support ``split``, ``chunk`` and the like, as some quantized ones."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.chunk, torch.Tensor.chunk, torch.split, torch.Tensor.split):
            raise NotImplementedError(f"{func.__name__} is not supported")
        return super().__torch_function__(func, types, args, kwargs or {})


@row(
    "A tensor class knows `narrow` and not `chunk`",
    torch="`fully_shard` raises the class's error",
    torch_reports=r"^NotImplementedError: chunk is not supported",
    here="cut by `narrow`",
    reason="`chunk` and `narrow` give the same shards.",
)
def class_without_chunk(library: Library, mesh: DeviceMesh) -> str:
    model: Any = nn.Linear(6, 6, bias=False)
    model.weight = nn.Parameter(model.weight.detach().as_subclass(Uncut))
    torch.manual_seed(1)
    library.fully_shard(model, mesh=mesh)
    return "right" if model.weight.to_local().shape == (3, 6) else "wrong"


@row(
    "A checkpoint of a parameter whose tensor class consists of inner tensors",
    torch="`torch.distributed.checkpoint` pickles the shards; its `load` raises unless `torch.serialization."
    "add_safe_globals` was called with the class",
    torch_reports=r"Unsupported global: GLOBAL tests\.helpers\.extension_tensors\.Pair",
    here="`load` admits the class of the parameter at hand, for it alone",
    reason="The model at hand says which class is wanted, and only its inner tensors are copied.",
)
def checkpoint_of_a_tensor_class(library: Library, mesh: DeviceMesh) -> str:
    def build(values: torch.Tensor) -> Any:
        model: Any = nn.Linear(6, 6, bias=False)
        model.weight = nn.Parameter(Pair(values, values * 2))
        return library.fully_shard(model, mesh=mesh)

    folders: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    path = Path(folders[0]) / "checkpoint"
    model, other = (build(values) for values in (torch.arange(36.0).view(6, 6), torch.zeros(6, 6)))
    try:
        if library is LIBRARIES["torch"]:
            dcp.save(get_model_state_dict(model), checkpoint_id=path)
            dcp.load(get_model_state_dict(other), checkpoint_id=path)
        else:
            save(path, model)
            load(path, other)
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folders[0])
    saved, loaded = model.weight.to_local(), other.weight.to_local()
    return "right" if torch.equal(saved.left, loaded.left) and torch.equal(saved.right, loaded.right) else "wrong"
