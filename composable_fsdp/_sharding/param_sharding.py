"""The sharding of one parameter: its mesh axes, its mesh and placements, and its layout before ``fully_shard``."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard, _StridedShard

from composable_fsdp._comm.communicator import GroupCommunicator
from composable_fsdp._comm.factory import communicator_over
from composable_fsdp._memory.buffers import contiguous_strides
from composable_fsdp._sharding.mesh import DataParallelAxes, join_meshes
from composable_fsdp.errors import ConfigurationError, ParameterError
from composable_fsdp.policies import DataParallelMeshDims

__all__ = [
    "FORMS",
    "FullMesh",
    "ModelParallel",
    "ParameterSharding",
    "PlainForm",
    "ShardPlacementResult",
    "as_dtensor",
    "as_dtensor_at_zero",
    "cuts",
    "data_parallel_placements",
    "shard_over_axes",
    "shard_over_full_mesh",
    "shard_within",
]


@dataclass(frozen=True)
class ShardPlacementResult:
    """A return value of ``shard_placement_fn`` that shards a parameter over its own mesh, for example that of experts.

    Args:
        placement: ``Shard(d)``, or ``None`` for ``Shard(0)``.
        mesh_info: the data-parallel mesh of the parameter, 1-d or 2-d.
        divide: the divisor of the sum of gradients over ``mesh_info``, before ``set_gradient_divide_factor``. ``None``
            is the number of ranks of ``mesh_info``. Experts whose tokens come from all data-parallel ranks need the
            number of these.

    Raises:
        ConfigurationError: ``divide`` is not positive.
    """

    placement: Shard | None
    mesh_info: DeviceMesh
    divide: float | None = None

    def __post_init__(self) -> None:
        is_number = isinstance(self.divide, int | float) and not isinstance(self.divide, bool)
        if self.divide is not None and not (is_number and self.divide > 0):
            raise ConfigurationError(
                f"divide of a ShardPlacementResult must be a positive number, not {self.divide!r}."
            )


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
    def may_leave_sums(self) -> bool:
        """True if gradients can arrive as pending sums over a model-parallel axis."""
        return any(self.mesh.size(axis) > 1 for axis in range(self.mesh.ndim) if axis not in self.data_axes)

    def communicators(self) -> list[GroupCommunicator]:
        """Return the communicators of the model-parallel axes. All ranks of ``mesh`` must call it together."""
        return [
            communicator_over(self.mesh.get_group(axis), self.mesh.device_type)
            for axis in range(self.mesh.ndim)
            if axis not in self.data_axes and self.mesh.size(axis) > 1
        ]

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
        arrived = gradient.placements
        wanted = tuple(
            got if axis in self.data_axes and _is_linear(got) else own
            for axis, (own, got) in enumerate(zip(self.placements, arrived, strict=True))
        )
        if wanted != arrived:
            if any(got.is_partial() and got != new for got, new in zip(arrived, wanted, strict=True)):
                gradient = cast(DTensor, gradient.to(sum_dtype))
            gradient = gradient.redistribute(placements=wanted)
        local: torch.Tensor = cast(Any, gradient)._local_tensor
        if isinstance(local, AsyncCollectiveTensor):
            local = local.wait()
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


def as_dtensor_at_zero(local: torch.Tensor, spec: Any, *, requires_grad: bool = False) -> DTensor:
    """Return ``local`` as a DTensor that reports no storage offset, so that ``copy.deepcopy`` can copy it.

    A DTensor reports the storage offset of the tensor that it is made with, but has no storage.
    """
    if type(local) is not torch.Tensor:
        return DTensor(local, spec, requires_grad=requires_grad)
    made = DTensor.__new__(DTensor, local.new_empty(0), spec, requires_grad=requires_grad)
    cast(Any, made)._local_tensor = local
    return made


_specs: MutableMapping[tuple[object, ...], DTensorSpec] = WeakValueDictionary()
"""The specs in use. Building and hashing one takes longer than all else of a ``DTensor``, and layers repeat shapes."""


def _spec_of(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Return the spec of a contiguous ``DTensor``, the same object for the same mesh and equal other arguments.

    Meshes that are equal can differ: one may be of process groups that have been destroyed.
    """
    key = (id(mesh), placements, shape, dtype)  # the spec keeps the mesh alive
    spec = _specs.get(key)
    if spec is None:
        meta = TensorMeta(torch.Size(shape), contiguous_strides(shape), dtype)
        spec = _specs.setdefault(key, DTensorSpec(mesh, placements, tensor_meta=meta))
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
    inner: ModelParallel | None = field(default=None)

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


@dataclass(frozen=True, eq=False)
class FullMesh:
    """The mesh with all axes of a job, its data-parallel ``dims``, and the ``axes`` made of these."""

    mesh: DeviceMesh
    dims: DataParallelMeshDims
    axes: DataParallelAxes


FORMS: list[Callable[[str, torch.Tensor, FullMesh], PlainForm | None]] = []
"""Read the form of a parameter, given its name. The first result counts. An error is that the form is wrong."""


def shard_over_full_mesh(name: str, parameter: torch.Tensor, full: FullMesh, dim: int) -> ParameterSharding:
    """Return the sharding of ``parameter``, a DTensor on the full mesh, over its data-parallel axes.

    A plain tensor with a form (:data:`FORMS`) is sharded as the DTensor that it describes.

    Raises:
        ParameterError: it is a plain tensor, on another mesh, or not replicated over these axes. The text names it.
    """
    forms = (read(name, parameter, full) for read in FORMS) if not isinstance(parameter, DTensor) else ()
    form = next((each for each in forms if each is not None), None)
    if form is not None:
        parameter = as_dtensor(parameter.detach(), full.mesh, form.placements, form.shape)
    if not isinstance(parameter, DTensor) or parameter.device_mesh != full.mesh:
        found = f"on {parameter.device_mesh}" if isinstance(parameter, DTensor) else "a plain tensor"
        raise ParameterError(
            f"with dp_mesh_dims every parameter must be a DTensor on the mesh given to fully_shard, but {name!r} is "
            f"{found}. Place it with torch.distributed.tensor.distribute_module(module, mesh) first."
        )
    names = full.mesh.mesh_dim_names or ()
    placements = list(parameter.placements)
    data_axes = frozenset(names.index(n) for n in (*full.dims.replicate_names, *full.dims.shard_names))
    for axis in sorted(data_axes):
        if not isinstance(placements[axis], Replicate):
            raise ParameterError(
                f"parameter {name!r} is placed {placements[axis]} on the data-parallel mesh dim {names[axis]!r}; it "
                "must be Replicate() there, so that fully_shard can shard it."
            )
    inner = ModelParallel(full.mesh, tuple(placements), tuple(parameter.shape), data_axes, form)
    shard_axes = [names.index(n) for n in full.dims.shard_names]
    if shard_axes:
        first = shard_axes[0]
        later = [axis for axis in range(first + 1, full.mesh.ndim) if axis not in data_axes]
        placements[first] = shard_within(dim, [placements[a] for a in later], [full.mesh.size(a) for a in later])
    mesh = full.mesh
    if len(data_axes) > full.axes.mesh.ndim:  # axes that were flattened into one stay one
        others = [axis for axis in range(full.mesh.ndim) if axis not in data_axes]
        before = [axis for axis in others if shard_axes and axis < shard_axes[0]]
        after = [axis for axis in others if axis not in before]
        left, right = [[full.mesh[names[axis]] for axis in side] for side in (before, after)]
        mesh = join_meshes(*left, full.axes.mesh, *right)
        replicated = [Replicate() for _ in range(full.axes.mesh.ndim - bool(shard_axes))]
        cut = [placements[shard_axes[0]]] if shard_axes else []
        placements = [*(placements[a] for a in before), *replicated, *cut, *(placements[a] for a in after)]
    return ParameterSharding(full.axes, dim, inner.shape, mesh, tuple(placements), inner)


def cuts(placement: Placement, dim: int) -> bool:
    """Return True if ``placement`` shards tensor dim ``dim``. In some torch releases a strided shard is not a
    ``Shard``.
    """
    return isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim


def shard_within(dim: int, later: Sequence[Placement], later_sizes: Sequence[int]) -> Placement:
    """Return the placement of a mesh axis that shards ``dim`` of a tensor already sharded by the axes ``later`` to its
    right.

    DTensor reads a mesh from left to right, so a plain ``Shard`` means that the left axis sharded first. If an axis to
    the right was first, the shards interleave. A strided shard records into how many parts the dim was split by then.
    """
    split = prod(size for placement, size in zip(later, later_sizes, strict=True) if cuts(placement, dim))
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
