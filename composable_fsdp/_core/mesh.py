"""Mesh axes, how each parameter is sharded over them, and the communicators of a group."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, cast
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard, _StridedShard

from composable_fsdp._core.comm import (
    Communicator,
    GroupCommunicator,
    LoopbackCommunicator,
    communicator_over,
    loopback,
)
from composable_fsdp._core.group_plan import PlanOptions
from composable_fsdp._core.layout import NEVER_ZERO_COPY
from composable_fsdp._core.memory import contiguous_strides, current_device, device_capabilities
from composable_fsdp.errors import ArgumentTypeError, MeshError

HOW_TO_START = (
    "Start one process per device with `torchrun --nproc-per-node N script.py`, or call "
    "`torch.distributed.init_process_group()` before fully_shard, or build a mesh with "
    "`torch.distributed.device_mesh.init_device_mesh` and pass it as mesh=."
)


@dataclass(frozen=True)
class DataParallelAxes:
    """The shard axis and the replicate axis of ``mesh``. An axis that the mesh lacks has one rank.

    Args:
        mesh: the data-parallel mesh. Its last axis is the shard axis, unless all replicate.
        device: the device on which this rank computes.
        shard: communicator of the ranks that parameters are sharded over.
        replicate: communicator of the ranks that hold the same shard.
        divide: the divisor of sums of gradients. ``None`` is the number of ranks, or the factor of the
            group; else ``set_gradient_divide_factor`` has no effect on these.
    """

    mesh: DeviceMesh
    device: torch.device
    shard: Communicator
    replicate: Communicator = field(default_factory=LoopbackCommunicator)
    divide: float | None = None

    @cached_property
    def num_ranks(self) -> int:
        """The number of data-parallel ranks, by which the mean of gradients divides."""
        return self.shard.size * self.replicate.size

    def on(self, device: torch.device | str | int) -> DataParallelAxes:
        """Return these axes for a rank that computes on ``device``; an int is a device index of the mesh's device type.

        Raises:
            MeshError: ``device`` has another type than the mesh.
        """
        kind = self.mesh.device_type
        chosen = torch.device(kind, device) if isinstance(device, int) else torch.device(device)
        if chosen.type != kind:
            raise MeshError(
                f"device={str(chosen)!r} contradicts the mesh, whose ranks compute on {kind}. Leave device out, or "
                f"build the mesh with init_device_mesh({chosen.type!r}, ...)."
            )
        return self if chosen == torch.device(kind) else replace(self, device=chosen)


_meshes: dict[dist.ProcessGroup | None, dict[Hashable, DeviceMesh]] = {}


def known_meshes() -> dict[Hashable, DeviceMesh]:
    """Return the meshes that the library has made over the default process group, by a key of who makes them.

    Meshes keep process groups alive, so those over an earlier default process group are dropped.
    """
    world = dist.group.WORLD
    if world not in _meshes:
        _meshes.clear()
    return _meshes.setdefault(world, {})


def data_parallel_axes(mesh: DeviceMesh) -> DataParallelAxes:
    """Return the axes of a 1-d mesh (shard) or of a 2-d mesh (replicate, shard).

    Raises:
        ArgumentTypeError: ``mesh`` is not a ``DeviceMesh``.
        MeshError: the mesh has another number of dims, or this rank is not in it.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentTypeError(
            f"mesh must be a torch.distributed.DeviceMesh, not {type(mesh).__name__}. {HOW_TO_START}"
        )
    if mesh.ndim not in (1, 2):
        raise MeshError(
            f"mesh must be 1-d (shard) or 2-d (replicate, shard), not {mesh.ndim}-d {tuple(mesh.shape)}. "
            "Slice the data-parallel dims out of it, for example mesh['dp'] or mesh['replicate', 'shard']."
        )
    if mesh.get_coordinate() is None:
        raise MeshError(
            f"rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}: only ranks of the mesh may call "
            "fully_shard with it."
        )
    # The last axis shards, the first of two replicates.
    shard = axis_communicator(mesh, mesh.ndim - 1)
    replicate = axis_communicator(mesh, 0) if mesh.ndim == 2 else LoopbackCommunicator()
    return DataParallelAxes(mesh, current_device(mesh.device_type), shard, replicate)


def join_meshes(*meshes: DeviceMesh) -> DeviceMesh:
    """Return one mesh with the axes of all ``meshes``, which must be slices of one mesh.

    Raises:
        MeshError: they are not.
    """
    advice = (
        "the data-parallel mesh and the mesh on which parameters are placed already must be slices of one mesh, for "
        "example mesh['dp'] and mesh['tp'] of init_device_mesh(..., mesh_dim_names=('dp', 'tp')). "
        f"Got {' and '.join(map(str, meshes))}."
    )
    if any(mesh.mesh_dim_names is None for mesh in meshes):
        raise MeshError(advice)
    try:
        return DeviceMesh._concatenate(list(meshes))
    except (RuntimeError, ValueError) as error:
        raise MeshError(advice) from error


def axis_communicator(mesh: DeviceMesh, dim: int) -> Communicator:
    if mesh.size(dim) == 1:
        return loopback()
    return communicator_over(mesh.get_group(dim), mesh.device_type)


@dataclass(frozen=True, eq=False)
class PlainForm:
    """The layout of a plain tensor that stands for a DTensor. Modules compute with its local tensor.

    Args:
        placements: the layout of the parameter, one placement for each axis of the mesh of all axes.
        gradient_placements: the layout of the gradient that a rank computes.
        shape: the shape of the parameter over all axes.
        attributes: the attributes of the original tensor that the sharded parameter does not have.
        restore: prepares the unsharded parameter before modules compute with it.
    """

    placements: tuple[Placement, ...]
    gradient_placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    attributes: tuple[str, ...]
    restore: Callable[[torch.Tensor], None]


@dataclass(frozen=True, eq=False)
class ModelParallel:
    """The DTensor layout of a parameter before ``fully_shard``. Its unsharded form has this layout too.

    Args:
        mesh: a tensor-parallel mesh, or with ``dp_mesh_dims`` the full mesh.
        placements: one per axis of ``mesh``.
        shape: the global shape of the parameter.
        data_axes: the axes of ``mesh`` that are data-parallel.
        form: that of a plain tensor that stands for a DTensor of this layout. It is plain when it is unsharded.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    data_axes: frozenset[int] = frozenset()
    form: PlainForm | None = None

    @property
    def model_axes(self) -> list[int]:
        """The model-parallel axes with several ranks: gradients can arrive as pending sums over these."""
        mesh = self.mesh
        return [axis for axis in range(mesh.ndim) if axis not in self.data_axes and mesh.size(axis) > 1]

    def communicators(self) -> list[GroupCommunicator]:
        """Return the communicators of the model-parallel axes. All ranks of ``mesh`` must call it together."""
        mesh = self.mesh
        return [communicator_over(mesh.get_group(axis), mesh.device_type) for axis in self.model_axes]

    def wrap(self, local: torch.Tensor) -> DTensor:
        """Return ``local`` as a DTensor that shares its memory."""
        return as_dtensor(local, self.mesh, self.placements, self.shape)

    def local_gradient(self, gradient: torch.Tensor, sum_dtype: torch.dtype) -> torch.Tensor:
        """Return the gradient of this rank's loss as a plain tensor, to be averaged over the data-parallel ranks.

        On a data-parallel axis, the local tensor of ``gradient`` is the gradient of this rank's loss, whether its
        placement is ``Replicate`` or ``Partial``, and nothing is communicated. A gradient that is sharded over such an
        axis holds the sum of all ranks' gradients. It is gathered, and each rank takes an equal fraction of it.

        Args:
            gradient: the gradient from autograd, a DTensor on :attr:`mesh`, or plain for a parameter with a ``form``.
            sum_dtype: dtype in which pending sums over model-parallel axes are computed. Such a result has this dtype;
                any other has the dtype of ``gradient``.
        """
        if self.form is not None:
            gradient = as_dtensor(gradient, self.mesh, self.form.gradient_placements, self.shape)
        assert isinstance(gradient, DTensor)
        # On data-parallel axes, keep what is a sum or a mean of local tensors.
        arrived = gradient.placements
        wanted = tuple(
            got if axis in self.data_axes and _is_linear(got) else own
            for axis, (own, got) in enumerate(zip(self.placements, arrived, strict=True))
        )
        # Sum over model-parallel axes, in the dtype of the reduction.
        if wanted != arrived:
            if any(got.is_partial() and got != new for got, new in zip(arrived, wanted, strict=True)):
                gradient = cast(DTensor, gradient.to(sum_dtype))
            gradient = gradient.redistribute(placements=wanted)
        local = gradient._local_tensor
        if isinstance(local, AsyncCollectiveTensor):
            local = local.wait()
        # A gradient that was gathered over data-parallel axes is the sum of all ranks: take a part of it.
        parts = prod(self.mesh.size(axis) for axis in self.data_axes if not _is_linear(arrived[axis]))
        return local if parts == 1 else local / parts


def _is_linear(placement: Placement) -> bool:
    """Return whether a tensor with ``placement`` is a sum or a mean of the ranks' local tensors."""
    return placement.is_replicate() or (isinstance(placement, Partial) and placement.reduce_op in ("sum", "avg"))


def as_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: tuple[int, ...]
) -> DTensor:
    """Return a DTensor of ``shape`` on ``mesh`` in the memory of ``local``, on the device of ``local``.

    ``DTensor.from_local`` would move offloaded shards to the device of the mesh. The parameter would keep that device,
    and accept no gradient in host memory.
    """
    spec = _spec_of(mesh, tuple(placements), shape, local.dtype)
    return DTensor(local.view_as(local), spec, requires_grad=False)


def as_dtensor_at_zero(local: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool = False) -> DTensor:
    """Return ``local`` as a DTensor that reports no storage offset, so that ``copy.deepcopy`` can copy it.

    A DTensor reports the storage offset of the tensor that it is made with, but has no storage.
    """
    if type(local) is not torch.Tensor:
        return DTensor(local, spec, requires_grad=requires_grad)
    # An empty tensor has no offset. Making one for each value took half of the time of a state dict.
    key = local.dtype, local.device
    empty = _empty_tensors.get(key)
    if empty is None:
        empty = local.new_empty(0)
        if type(empty) is torch.Tensor:  # no fake one
            _empty_tensors[key] = empty
    made = DTensor.__new__(DTensor, empty, spec, requires_grad=requires_grad)
    made._local_tensor = local
    return made


_empty_tensors: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
"""An empty tensor of each dtype and device, with which DTensors without a storage offset are made."""

_specs: dict[tuple[object, ...], ref[DTensorSpec]] = {}
"""The specs in use. Building and hashing one takes longer than all else of a ``DTensor``, and layers repeat shapes.

Not a ``WeakValueDictionary``: that hashes keys when the interpreter ends, and torch's hash of a ``_StridedShard`` fails
there.
"""
_MOST_UNUSED_SPECS = 1024


def _spec_of(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> DTensorSpec:
    """Return the spec of a contiguous ``DTensor``, the same object for the same mesh and equal other arguments.

    Meshes that are equal can differ: one may be of process groups that have been destroyed.
    """
    key = (id(mesh), placements, shape, dtype)  # the spec keeps the mesh alive
    known = _specs.get(key)
    spec = None if known is None else known()
    if spec is None:
        if len(_specs) % _MOST_UNUSED_SPECS == 0:
            for unused in [other for other, reference in list(_specs.items()) if reference() is None]:
                _specs.pop(unused, None)
        meta = TensorMeta(torch.Size(shape), contiguous_strides(shape), dtype)
        spec = DTensorSpec(mesh, placements, tensor_meta=meta)
        _specs[key] = ref(spec)
    return spec


@dataclass(frozen=True, eq=False)
class ParameterSharding:
    """The axes that shard a parameter on ``dim``, and the mesh and placements of the resulting DTensor.

    ``shape`` is the global shape of the parameter. If the parameter was a DTensor before (``inner``), the axes shard
    its local tensor.
    """

    axes: DataParallelAxes
    dim: int
    shape: tuple[int, ...]
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    inner: ModelParallel | None = None

    def wrap_shard(self, local: torch.Tensor) -> DTensor:
        """Return ``local``, this rank's shard, as a DTensor that shares its memory."""
        return as_dtensor(local, self.mesh, self.placements, self.shape)

    def parameter(self, local: torch.Tensor, requires_grad: bool) -> nn.Parameter:
        """Return a ``DTensor`` parameter with the local tensor ``local``, this rank's shard.

        Equal to ``nn.Parameter(self.wrap_shard(local), requires_grad)``, which takes three times as long.
        """
        spec = _spec_of(self.mesh, self.placements, self.shape, local.dtype)
        made: Any = as_dtensor_at_zero(local, spec, requires_grad=requires_grad)
        made._is_param = True
        return cast(nn.Parameter, made)

    def wrap_full(self, local: torch.Tensor) -> torch.Tensor:
        """Return the parameter that modules compute with, for the all-gathered tensor ``local``."""
        return local if self.inner is None or self.inner.form is not None else self.inner.wrap(local)


def shard_over_axes(parameter: torch.Tensor, axes: DataParallelAxes, dim: int) -> ParameterSharding:
    """Return the sharding over ``axes`` of ``parameter``, a plain tensor or a DTensor on another mesh.

    Raises:
        MeshError: the two meshes are not slices of one mesh.
    """
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return ParameterSharding(axes, dim, shape, axes.mesh, data_parallel_placements(axes.mesh.ndim, dim))
    inner = ModelParallel(parameter.device_mesh, tuple(parameter.placements), shape)
    placements = data_parallel_placements(axes.mesh.ndim, dim, inner.placements, tuple(inner.mesh.shape))
    return ParameterSharding(axes, dim, shape, join_meshes(axes.mesh, inner.mesh), placements, inner)


def shard_within(dim: int, later: Sequence[Placement], later_sizes: Sequence[int]) -> Placement:
    """Return the placement of a mesh axis that shards ``dim`` of a tensor already sharded by the axes ``later`` to its
    right.

    DTensor reads a mesh from left to right, so a plain ``Shard`` means that the left axis sharded first. If an axis to
    the right was first, the shards interleave. A strided shard records into how many parts the dim was split by then.
    """
    kinds = (Shard, _StridedShard)  # in some torch releases, a strided shard is not a ``Shard``
    placed = zip(later, later_sizes, strict=True)
    split = prod(size for placement, size in placed if isinstance(placement, kinds) and placement.dim == dim)
    return Shard(dim) if split == 1 else _StridedShard(dim, split_factor=split)


def data_parallel_placements(
    mesh_ndim: int, dim: int, inner: Sequence[Placement] = (), inner_sizes: Sequence[int] = ()
) -> tuple[Placement, ...]:
    """Return the placements on a data-parallel mesh followed by the ``inner`` mesh of an already distributed parameter.

    Args:
        mesh_ndim: 1 for ``(shard,)``, 2 for ``(replicate, shard)``: the last data-parallel axis shards.
        dim: the tensor dim that the data-parallel axis shards.
        inner: placements on the other mesh, none for a plain tensor.
        inner_sizes: ranks along each axis of the other mesh.
    """
    replicated = (Replicate() for _ in range(mesh_ndim - 1))
    return (*replicated, shard_within(dim, inner, inner_sizes), *inner)


class Channels:
    """The choice of the communicators of a group: here, that of the shard axis for all collectives. For plugins."""

    @property
    def can_be_shared(self) -> bool:
        """True if collectives of the group may be fused with those of other groups."""
        return True

    @property
    def has_separate_scatter(self) -> bool:
        """True if reduce-scatters have a process group of their own."""
        return False

    def of(self, axes: DataParallelAxes) -> tuple[Communicator, Communicator, Communicator]:
        """Return the communicators ``gather``, ``scatter`` and ``exchange`` for ``axes``."""
        return axes.shard, axes.shard, axes.shard


class ProcessGroups:
    """The communicators for all-gathers (``gather``) and reduce-scatters (``scatter``), over the same ranks.

    Encoded reductions, which add up themselves, use ``exchange``.
    """

    def __init__(self, axes: DataParallelAxes) -> None:
        self.axes = axes
        self.device = device_capabilities(axes.device)
        """The capabilities of the device on which modules compute."""
        self.choose(Channels())
        self.reduces_unused = False
        """True if a rank may join a reduction without any gradient.

        A reduction then gives every trainable parameter a gradient, zeros for those that no rank used.
        """

    @property
    def replicate(self) -> Communicator:
        return self.axes.replicate

    def plan_options(self) -> PlanOptions:
        """Return the options of the group's plan: on streams one message per direction, as in FSDP2."""
        one_message = self.device.has_streams and not self.gather.traits.aliases
        return PlanOptions(
            num_shards=self.axes.shard.size,
            zero_copy_min_bytes=NEVER_ZERO_COPY if one_message else self.gather.traits.zero_copy_min_bytes,
            reduce_direct_bytes=NEVER_ZERO_COPY if one_message else self.scatter.traits.zero_copy_min_bytes,
            widens=self.scatter.traits.widens,
            alias=self.gather.traits.aliases and self.gather.size == 1,
            flags=self.axes.num_ranks > 1 and not self.reduces_unused,
            custom=not self.channels.can_be_shared,
        )

    def choose(self, channels: Channels) -> None:
        """Use these communicators until the next choice."""
        self.channels = channels
        self.gather, self.scatter, self.exchange = channels.of(self.axes)

    def follow(self, other: ProcessGroups) -> None:
        """Copy the choices made for ``other``."""
        self.reduces_unused = other.reduces_unused
        self.choose(other.channels)
