"""What a root is made of, in lines that must be the same on every rank."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch

from composable_fsdp.comm.agreement import OrderCheck
from composable_fsdp.comm.alike import check_alike
from composable_fsdp.mesh import DataParallelAxes
from composable_fsdp.runtime.unit import Unit

__all__ = ["check_models"]


def check_models(root: Unit, units: Mapping[str, Unit]) -> None:
    """Compares what is below ``root`` on all ranks that talk to each other: one small all-gather for each mesh axis.

    Ranks of a mesh compare what is sharded over that mesh, so that others, as those with other experts, may differ.

    Raises:
        DivergenceError: they differ. On all ranks, with the same text.
    """
    if root.order_check is OrderCheck.OFF:
        return
    every = dict.fromkeys([root.group.axes, *(c.axes for unit in units.values() for c in unit.group.channels)])
    for axes in every:
        lines = _lines(root, units, axes)
        check_alike(lines, (axes.shard, axes.replicate), axes.device, f"the model under {root.class_name}")


def _surroundings(root: Unit, axes: DataParallelAxes) -> str:
    return (
        f"composable_fsdp {_version()}, torch {torch.__version__}, mesh of ranks {axes.mesh.mesh.tolist()}, "
        f"order check {root.order_check.value!r}, max_merged_bytes {root.max_merged_bytes}, "
        f"max_unsharded_bytes {root.max_unsharded_bytes}, prefetch_limit {root.prefetch_limit}"
    )


def _lines(root: Unit, units: Mapping[str, Unit], axes: DataParallelAxes) -> Iterator[str]:
    yield _surroundings(root, axes)
    for name, unit in units.items():
        parameters = [p for p in unit.group.parameters if p.sharding.axes == axes]
        if not parameters and unit.group.axes != axes:
            continue
        yield (
            f"group {name!r} of {unit.class_name}: {_chosen(unit.precision)}, {_chosen(unit.group.offload)}, "
            f"{_chosen(unit.reshard)}, unused parameters reduced: {unit.unequal_use}"
        )
        for parameter in parameters:
            yield f"parameter {parameter.name!r} of group {name!r}: {parameter.description}"


def _chosen(policy: Any) -> str:
    """Those fields that are not as they are unless told."""
    values = [f"{f.name}={value}" for f in fields(policy) if (value := getattr(policy, f.name)) != f.default]
    return f"{type(policy).__name__}({', '.join(values)})"


def _version() -> str:
    try:
        return importlib.metadata.version("composable-fsdp")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
