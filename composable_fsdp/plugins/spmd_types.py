"""Parameters with types of the package ``spmd_types``: plain tensors that stand for DTensors on the mesh of all axes.

At rest such a parameter is the DTensor that its types describe, sharded like any other. Modules compute with the plain
local tensor, which has the types again while the package checks them. Types of forward fix those of backward: a
parameter that is replicated (``R``) on a tensor-parallel axis has gradients that are partial there and must be summed;
one that is invariant (``I``) or sharded (``S``) has complete ones. The rules are those of torch's FSDP2 from 2.14 on.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Shard

from composable_fsdp._core.full_mesh import FullMesh
from composable_fsdp._core.mesh import PlainForm
from composable_fsdp._core.seams import ObservedRoot, Observer
from composable_fsdp._core.state import ForwardCall
from composable_fsdp.errors import ParameterError

_ATTRIBUTES = ("_local_type", "_partition_spec")
"""The attributes in which the package keeps the types of a tensor."""


class SpmdTypes(Observer):
    """Gives unsharded parameters their types, once the package is imported."""

    def before_first_hook(self, root: ObservedRoot) -> None:
        if "spmd_types" in sys.modules:
            root.observers.add(_IMPORTED)


class _Imported(Observer):
    def enter_call(self, root: ObservedRoot, call: ForwardCall) -> None:
        for parameter in call.state.group.parameters:
            inner = parameter.sharding.inner
            if inner is not None and inner.form is not None:
                inner.form.restore(parameter.unsharded)


_IMPORTED = _Imported()


def _restore(types: Mapping[Any, Any], partition_spec: Any, unsharded: torch.Tensor) -> None:
    """Give ``unsharded`` its types, if the package checks types now."""
    spmd: Any = sys.modules["spmd_types"]
    if spmd.is_type_checking():
        spmd.assert_type(unsharded, dict(types), partition_spec=partition_spec)


def without_type_checks() -> AbstractContextManager[None]:
    """Return a context without checks of types, for code of this library inside of a forward.

    The package checks in a ``TorchFunctionMode``, so hooks notice that there is a context to leave.
    """
    spmd: Any = sys.modules.get("spmd_types")
    return nullcontext() if spmd is None else spmd.no_typecheck()


def read_types(name: str, parameter: torch.Tensor, full: FullMesh) -> PlainForm | None:
    """Return the form of ``parameter`` on the ``full`` mesh by its types, or ``None`` if it has none.

    Raises:
        ParameterError: types are missing on an axis, or contradict the mesh. The text names the parameter.
    """
    if not getattr(parameter, "_local_type", None):
        return None
    mesh, dims = full.mesh, full.dims
    spmd: Any = import_module("spmd_types")
    flatten: Any = import_module("spmd_types._mesh_axis").flatten_axes
    own, spec = dict(spmd.get_local_type(parameter)), spmd.get_partition_spec(parameter)
    shards = {} if spec is None else import_module("spmd_types.types").partition_spec_to_shard_types(spec)
    types = {**own, **shards}
    axes = {axis: spmd.MeshAxis.of(mesh.get_group(axis)) for axis in mesh.mesh_dim_names or ()}
    data = flatten(tuple(axes[axis] for axis in (*dims.replicate_names, *dims.shard_names)))

    def spans_all(found: frozenset[Any]) -> bool:
        some, all_axes = (spmd.normalize_mesh(frozenset(each)) for each in (found, axes.values()))
        return some == all_axes or (bool(some and all_axes) and flatten(tuple(some)) == flatten(tuple(all_axes)))

    def refuse(problem: str) -> ParameterError:
        return ParameterError(
            f"parameter {name!r} has types of spmd_types {types}, but {problem}. The mesh has the axes {axes}, "
            f"of which {dims} are data-parallel: annotate parameters there with R or not at all, and on all other axes."
        )

    checked = frozenset(types)
    if not spans_all(checked):
        checked = frozenset(spmd.current_mesh() or ())
        if not spans_all(checked):
            raise refuse(
                "they are not on all axes, and spmd_types.set_current_mesh(...) around fully_shard, which names the "
                "others, is missing or is a mesh of other ranks"
            )
        if not checked.issuperset(own):
            raise refuse(f"the current mesh of spmd_types has the axes {set(checked)} only")
    for axis, kind in types.items():
        if axis <= data and kind is not spmd.R:
            raise refuse(f"{kind} on the data-parallel axis {axis} would reduce its gradients twice")
        if not axis <= data and axis not in axes.values():
            raise refuse(f"{axis} is no axis of the mesh")
    placements, gradients, shape = [], [], list(parameter.shape)
    for mesh_name, axis in axes.items():
        is_data = axis <= data
        if not is_data and axis not in types and mesh.size(list(axes).index(mesh_name)) > 1:
            raise refuse(f"none on the axis {mesh_name!r}")
        kind = spmd.R if is_data else types.get(axis, spmd.I)
        if kind is spmd.V:
            raise refuse(f"V on the axis {mesh_name!r} does not say which dim is sharded: S(dim), or a PartitionSpec")
        placements.append(spmd.spmd_type_to_dtensor_placement(kind))
        gradients.append(spmd.spmd_type_to_dtensor_placement(kind.backward_type()))
        if isinstance(placements[-1], Shard):
            shape[placements[-1].dim] *= mesh.size(list(axes).index(mesh_name))
    restore = partial(_restore, dict.fromkeys(checked, spmd.R) | own, spec)
    return PlainForm(tuple(placements), tuple(gradients), tuple(shape), _ATTRIBUTES, restore)
