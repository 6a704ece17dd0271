"""All-gather extensions of tensor subclasses: ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

``fsdp_get_unsharded_view`` takes their place for frozen parameters of one rank. The hooks are found on the local tensor
of a sharded parameter: on its class or on the instance. They are looked up and checked when a group is built, equally
on every rank, and not at each call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias, cast
from weakref import ref

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp._core.memory import contiguous_strides
from composable_fsdp._core.mesh import DataParallelAxes, known_meshes
from composable_fsdp._core.params import ShardedParameter, is_wrapper, plain_tensors
from composable_fsdp.errors import ParameterError
from composable_fsdp.plugins.extensions.tensor_classes import (
    GATHER_HOOKS,
    VIEW_HOOK,
    cut_padding,
    num_arguments,
    plain_values,
)
from composable_fsdp.policies import MixedPrecisionPolicy

RELEASE_HOOK = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


Tensors: TypeAlias = Sequence[torch.Tensor]
Payload: TypeAlias = tuple[tuple[torch.Tensor, ...], object]
"""The contiguous tensors that a hook sends for one parameter, and the metadata that it gets back afterwards."""
Made: TypeAlias = tuple[torch.Tensor, tuple[torch.Tensor, ...]]
"""The full tensor and the tensors that it is made of."""


@dataclass(frozen=True)
class PlainExtension:
    """A parameter that is all-gathered like any other, whose tensor has a class to keep.

    Args:
        name: the parameter's name, for messages.
        local: this rank's shard.
        dim: the sharded dim.
        dtype: dtype on the wire and of computation.
    """

    name: str
    local: torch.Tensor
    dim: int
    dtype: torch.dtype

    def pre_all_gather(self) -> Payload:
        values = plain_values(self.name, self.local, self.dtype)
        return (values.movedim(self.dim, 0).contiguous(),), None

    def post_all_gather(self, outputs: Tensors, metadata: object, dtype: torch.dtype) -> Made:
        full = outputs[0].movedim(0, self.dim).contiguous()
        return full, (full,)

    def refill(self, outputs: Tensors, metadata: object, dtype: torch.dtype, out: torch.Tensor) -> object:
        if out.data_ptr() != outputs[0].data_ptr():
            out.copy_(outputs[0].movedim(0, self.dim))
        return None


@dataclass(frozen=True)
class ViewExtension:
    """A parameter of one rank whose tensor has made ``view``, in its own memory, to compute with. Nothing is sent."""

    name: str
    local: torch.Tensor
    view: torch.Tensor

    def pre_all_gather(self) -> Payload:
        return (), None

    def post_all_gather(self, outputs: Tensors, metadata: object, dtype: torch.dtype) -> Made:
        return self.view, ()

    def refill(self, outputs: Tensors, metadata: object, dtype: torch.dtype, out: torch.Tensor) -> object:
        return None


@dataclass(frozen=True)
class Extension:
    """The all-gather hooks of one parameter.

    Args:
        name: the parameter's name, for messages.
        local: this rank's shard, on which the hooks are called.
        mesh: the shard axis, 1-d.
        outer_size: shape of the tensor that the shard axis shards.
        dim: the sharded dim.
        module: a weak reference to the first module on which the parameter is registered.
        policy: the group's mixed precision.
        takes_all: True if the first hook takes five arguments, false if it takes the mesh alone.
        releases_outputs: True if the gathered outputs are freed once the second hook has returned.
    """

    name: str
    local: torch.Tensor
    mesh: DeviceMesh
    outer_size: tuple[int, ...]
    dim: int
    module: ref[nn.Module]
    policy: MixedPrecisionPolicy
    takes_all: bool
    releases_outputs: bool = False

    def pre_all_gather(self) -> Payload:
        """Call the first hook.

        Quantizing hooks compute a maximum, which an empty shard does not have. If the hook raises on an empty shard, it
        is called on one row of zeros instead, and none of that row is sent. This happens in the same call, so the rank
        still takes part in collectives of the hook. It is not remembered: a hook that knows its scales already does not
        raise, and runs no collectives.
        """
        try:
            return self._call_pre(self.local)
        except Exception:  # raised by user code; retried for an empty shard only
            if self.local.numel() or not prod(self.outer_size):
                raise
            shape = list(self.local.shape)
            shape[self.dim] = 1
            one_row = self.local.new_zeros(shape)
            if not hasattr(one_row, GATHER_HOOKS[0]):
                raise
            inputs, metadata = self._call_pre(one_row)
            return tuple(t[:0] if t.dim() else t for t in inputs), metadata

    def _call_pre(self, tensor: torch.Tensor) -> Payload:
        shard: Any = tensor
        if self.takes_all:
            size, stride = torch.Size(self.outer_size), contiguous_strides(self.outer_size)
            result = shard.fsdp_pre_all_gather(self.mesh, size, stride, self.module(), self.policy)
        else:
            result = shard.fsdp_pre_all_gather(self.mesh)
        if not isinstance(result, tuple) or len(result) != 2 or not _are_tensors(result[0]):
            raise ParameterError(
                f"fsdp_pre_all_gather of parameter {self.name!r} must return (tuple of tensors, metadata), not "
                f"{result!r:.200}. Inputs of ranks are concatenated on dim 0: instead of torch's AllGatherInput, "
                "return its tensor, and rearrange the output in fsdp_post_all_gather."
            )
        return tuple(t.contiguous() for t in result[0]), result[1]

    def refill(self, outputs: Tensors, metadata: object, dtype: torch.dtype, out: torch.Tensor) -> object:
        """Call the second hook to fill ``out``, which the first call made. The result is used for checks only."""
        result: object = cast(Any, self.local).fsdp_post_all_gather(tuple(outputs), metadata, dtype, out=out)
        return result

    def post_all_gather(self, outputs: Tensors, metadata: object, dtype: torch.dtype) -> Made:
        """Call the second hook for the first time; return the full tensor and the tensors that it is made of."""
        result = cast(Any, self.local).fsdp_post_all_gather(tuple(outputs), metadata, dtype)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], torch.Tensor):
            raise ParameterError(
                f"fsdp_post_all_gather of parameter {self.name!r} must return (tensor, tuple of the tensors that it is "
                f"made of) when out is None, not {type(result).__name__}."
            )
        full = cut_padding(self.name, result[0], self.outer_size, self.dim)
        if full is None:
            raise ParameterError(
                f"fsdp_post_all_gather of parameter {self.name!r} returned a tensor of shape {tuple(result[0].shape)}; "
                f"the whole parameter has {self.outer_size}. Return that shape, or one that is longer on dim "
                f"{self.dim}, of which the end is cut off."
            )
        return full, tuple(result[1])


GatherExtension: TypeAlias = Extension | ViewExtension | PlainExtension
"""How one parameter is encoded for an all-gather and decoded after it."""

_MARKS = (0xA5, 0x5A, 0xC3, 0x3C)
_MARKED_BYTES = 64


def refill_checked(
    extension: GatherExtension,
    outputs: Sequence[torch.Tensor],
    metadata: object,
    dtype: torch.dtype,
    out: torch.Tensor,
    freed: Collection[int],
) -> None:
    """Refill ``out`` and raise unless the hook wrote to it. Blocks until the device is done.

    A version counter does not show writes: hooks may preserve it, or write through ``.data`` or a kernel of their own.
    So the first bytes of the memory that only the hook can fill are marked before the call and compared after it. If a
    mark is still there the hook is called again after another mark, as it may have written a value equal to the first.

    Args:
        freed: addresses of the storage objects that were freed and hold no gathered output.

    Raises:
        ParameterError: the hook ignored ``out``.
    """
    to_fill = set(freed)
    for mark in _MARKS:
        for begin in _first_bytes(out, to_fill):
            begin.fill_(mark)
        result = extension.refill(outputs, metadata, dtype, out)
        replaced = _replaced_by(result, out, outputs)
        if replaced is not None and replaced not in to_fill:
            to_fill.add(replaced)  # not marked yet
        elif not any(bool((begin == mark).all()) for begin in _first_bytes(out, to_fill)):
            return
    raise ParameterError(
        f"fsdp_post_all_gather of parameter {extension.name!r} ({type(extension.local).__name__}) ignored out. At the "
        "first gather it returned a tensor with memory of its own; a later gather wrote nothing there, so the "
        "parameter would have undefined or old values. Where out is not None, write the parameter into it "
        "(out.copy_(...)) and return None; or return views of the gathered outputs at the first gather."
    )


def _first_bytes(out: torch.Tensor, storages: Collection[int]) -> Iterator[torch.Tensor]:
    """Yield the first bytes, as uint8, of each tensor of ``out`` whose storage is in ``storages``."""
    for tensor in plain_tensors(out):
        storage = tensor.untyped_storage()
        if storage._cdata in storages and tensor.numel():
            offset = tensor.storage_offset() * tensor.itemsize
            contiguous = min(_MARKED_BYTES, tensor.nbytes) if tensor.is_contiguous() else tensor.itemsize
            yield torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, offset, (contiguous,), (1,))


def _replaced_by(result: object, out: torch.Tensor, outputs: Sequence[torch.Tensor]) -> int | None:
    """Return the storage of ``out`` if it holds no output and ``result`` is in another storage; else ``None``."""
    full: Any = result[0] if isinstance(result, tuple) and result else None
    if not isinstance(full, torch.Tensor) or is_wrapper(full) or is_wrapper(out):
        return None
    own, others = out.untyped_storage()._cdata, {output.untyped_storage()._cdata for output in outputs}
    return own if own not in others and full.untyped_storage()._cdata != own else None


def _are_tensors(inputs: object) -> bool:
    return isinstance(inputs, (tuple, list)) and all(isinstance(t, torch.Tensor) for t in inputs)


def find_extension(parameter: ShardedParameter) -> Extension | None:
    """Return the all-gather hooks of the local tensor of ``parameter``, or ``None`` if it has none.

    Raises:
        ExtensionError: it has only one of the two hooks, or one that takes neither one nor five arguments.
        ParameterError: its answer whether outputs are released is no bool.
    """
    name, local, dim, axes = parameter.name, parameter.local, parameter.dim, parameter.sharding.axes
    arity = num_arguments(name, local)
    if arity is None:
        return None
    releases = getattr(local, RELEASE_HOOK, lambda: False)()
    if not isinstance(releases, bool):
        raise ParameterError(f"{RELEASE_HOOK} of parameter {name!r} must return a bool, not {releases!r}.")
    module, policy, mesh = ref(parameter.owners[0][0]), parameter.precision, shard_mesh_of(axes)
    return Extension(name, local, mesh, parameter.shape, dim, module, policy, arity == 5, releases)


def find_view(parameter: ShardedParameter) -> ViewExtension | None:
    """Return the view that ``fsdp_get_unsharded_view`` of the local tensor makes, or ``None`` if there is none.

    Raises:
        ParameterError: the view is no tensor, or differs in shape, dtype or device.
    """
    name, local = parameter.name, parameter.local
    make = getattr(local, VIEW_HOOK, None)
    mesh, module = shard_mesh_of(parameter.sharding.axes), parameter.owners[0][0]
    view = None if make is None else make(mesh, module, parameter.precision)
    if view is None:
        return None
    if not isinstance(view, torch.Tensor) or _form(view) != _form(local):
        found = " ".join(map(str, _form(view))) if isinstance(view, torch.Tensor) else type(view).__name__
        raise ParameterError(
            f"fsdp_get_unsharded_view of parameter {name!r} returned {found}; it must return a tensor with the "
            f"parameter's local shape, dtype, and device, {' '.join(map(str, _form(local)))}, in the memory of the "
            "parameter, or None."
        )
    return ViewExtension(name, local, view)


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def shard_mesh_of(axes: DataParallelAxes) -> DeviceMesh:
    """Return the shard axis of ``axes`` as a 1-d mesh, the same object each time."""
    mesh, names = axes.mesh, axes.mesh.mesh_dim_names
    if mesh.ndim == 1:
        return mesh
    if names is not None:
        return mesh[names[-1]]
    # Every slice of a mesh is a new object, and a process group can have a backend for each type of device.
    known, key = known_meshes(), (mesh.get_group(mesh.ndim - 1), mesh.device_type)
    if key not in known:
        known[key] = DeviceMesh.from_group(*key)
    return known[key]
