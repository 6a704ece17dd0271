"""Meshes as users give them: none, the dims of a larger one by name, and that of single parameters."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from composable_fsdp._core.comm import loopback
from composable_fsdp._core.memory import backend_capabilities, current_accelerator, current_device, is_accelerator
from composable_fsdp._core.mesh import (
    HOW_TO_START,
    DataParallelAxes,
    ModelParallel,
    ParameterSharding,
    PlainForm,
    as_dtensor,
    axis_communicator,
    data_parallel_axes,
    join_meshes,
    known_meshes,
    shard_within,
)
from composable_fsdp.errors import (
    ArgumentTypeError,
    ConfigurationError,
    MeshError,
    OffloadBackendWarning,
    ParameterError,
)
from composable_fsdp.policies import DataParallelMeshDims

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The environment variables from which torch starts a process group."""


def warn_without_cpu_backend(axes: DataParallelAxes) -> None:
    """Warn which operations fail on CPU-offloaded shards if a process group has no backend for CPU tensors.

    Training needs none: parameters and gradients are communicated on the device where modules compute.

    Warns:
        OffloadBackendWarning: a process group of the mesh has none.
    """
    device = axes.device.type
    for dim in range(axes.mesh.ndim):
        group = axes.mesh.get_group(dim)
        if is_accelerator(axes.device) and torch.device("cpu") not in cast(Any, group)._device_types:
            warnings.warn(
                f"CPUOffloadPolicy keeps shards on CPU, but the process group of dim {dim} of {axes.mesh} has no "
                f"backend for CPU tensors ({dist.get_backend_config(group)}). Training works. Operations that "
                "communicate the shards themselves fail: full_tensor(), GradScaler, and torch's clip_grad_norm_, "
                "instead of which composable_fsdp.clip_grad_norm_ works. For these call init_process_group with both "
                f'backends, such as "cpu:gloo,{device}:nccl". Else filter this '
                "composable_fsdp.errors.OffloadBackendWarning.",
                OffloadBackendWarning,
                stacklevel=3,
            )
            return


def default_mesh() -> DeviceMesh:
    """Return a 1-d mesh over the default process group, on its accelerator if it serves one, else on CPU.

    The group is started from the environment, such as that of torchrun, if there is none. The mesh has no dim names,
    because peft and others take any name but ``fsdp`` for tensor parallelism.

    Raises:
        MeshError: there is no process group, and the environment lacks a variable to start one.
    """
    if not dist.is_initialized():
        missing = [name for name in _RENDEZVOUS if name not in os.environ]
        if missing:
            raise MeshError(
                "fully_shard was given no mesh and there is no default process group, nor can one be started from the "
                f"environment, which lacks {', '.join(missing)}. {HOW_TO_START}"
            )
        dist.init_process_group()
    known = known_meshes()
    if "default" not in known:
        known["default"] = init_device_mesh(_default_device_type(), (dist.get_world_size(),))
    return known["default"]


def _default_device_type() -> str:
    """Return the accelerator's type if the default process group has a native backend for it, else ``"cpu"``.

    gloo is not native: it stages through the host.
    """
    accelerator, world = current_accelerator(), dist.group.WORLD
    assert world is not None
    is_served = accelerator is not None and backend_capabilities(world, accelerator.type).is_native
    return accelerator.type if accelerator is not None and is_served else "cpu"


def named_data_parallel_axes(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DataParallelAxes:
    """Return the axes of the dims of ``mesh`` that ``dims`` names. Several names become one axis.

    Raises:
        ArgumentTypeError: ``mesh`` is not a ``DeviceMesh``.
        MeshError: ``mesh`` has no dim names, or not these.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentTypeError(f"dp_mesh_dims needs mesh= to be a DeviceMesh, not {type(mesh).__name__}.")
    names = mesh.mesh_dim_names
    if names is None:
        raise MeshError("dp_mesh_dims names dims of the mesh, but the mesh has none: give it mesh_dim_names.")
    unknown = [name for name in (*dims.replicate_names, *dims.shard_names) if name not in names]
    if unknown:
        raise MeshError(f"dp_mesh_dims names {unknown}, but the dims of the mesh are {list(names)}.")
    parts = [_one_axis(mesh, part) for part in (dims.replicate_names, dims.shard_names) if part]
    axes_mesh = parts[0] if len(parts) == 1 else join_meshes(*parts)
    if dims.shard_names:
        return data_parallel_axes(axes_mesh)
    device = current_device(mesh.device_type)
    return DataParallelAxes(axes_mesh, device, loopback(), axis_communicator(axes_mesh, 0))


def _one_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


@dataclass(frozen=True)
class ShardPlacementResult:
    """A return value of ``shard_placement_fn`` that shards a parameter over its own mesh, for example that of experts.

    Args:
        placement: ``Shard(d)``, or ``None`` for ``Shard(0)``.
        mesh_info: the data-parallel mesh of the parameter, 1-d or 2-d.
        divide: the divisor of the sum of gradients over ``mesh_info``; ``set_gradient_divide_factor`` then has no
            effect on this parameter. ``None`` is the number of ranks of ``mesh_info``. Experts whose tokens come from
            all data-parallel ranks need the number of these.

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
class FullMesh:
    """The mesh with all axes of a job, its data-parallel ``dims``, and the ``axes`` made of these."""

    mesh: DeviceMesh
    dims: DataParallelMeshDims
    axes: DataParallelAxes


FORMS: list[Callable[[str, torch.Tensor, FullMesh], PlainForm | None]] = []
"""Each returns the form of a plain parameter, or ``None``; it raises if the form is wrong. The first form counts."""


def shard_over_full_mesh(name: str, parameter: torch.Tensor, full: FullMesh, dim: int) -> ParameterSharding:
    """Return the sharding of ``parameter``, a DTensor on the full mesh, over its data-parallel axes.

    A plain tensor with a form (:data:`FORMS`) is sharded as the DTensor that it describes.

    Raises:
        ParameterError: it is a plain tensor, on another mesh, or not replicated over these axes. The text names it.
    """
    # A plain tensor may stand for a DTensor.
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
    # It must be replicated over the data-parallel axes, of which the shard axis then cuts it.
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
    # The placement on the shard axis: strided if an axis to its right has cut the same dim before.
    shard_axes = [names.index(n) for n in full.dims.shard_names]
    if shard_axes:
        first = shard_axes[0]
        later = [axis for axis in range(first + 1, full.mesh.ndim) if axis not in data_axes]
        placements[first] = shard_within(dim, [placements[a] for a in later], [full.mesh.size(a) for a in later])
    # Several dims of one name were flattened into one axis, so the mesh of the result has fewer dims.
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
