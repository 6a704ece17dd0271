"""``calibrate``: measures the collectives of a mesh without a model, and writes a table for ``set_schedule``."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_fsdp._core.comm import Communicator
from composable_fsdp._core.memory import current_accelerator
from composable_fsdp._core.mesh import data_parallel_axes
from composable_fsdp.cli.printing import Json, console, print_json, table_of
from composable_fsdp.errors import ConfigurationError
from composable_fsdp.plan.simulated_job import mesh_shape
from composable_fsdp.plugins.tuning.calibration import (
    axes_costs,
    collectives_of,
    measure_collective,
    measure_copies,
    medians,
    message_sizes,
    over_ranks,
)
from composable_fsdp.plugins.tuning.clock import Clock
from composable_fsdp.plugins.tuning.costs import CollectiveCost, Costs

__all__ = ["calibrate", "measure_costs"]

_NAMES = {1: ("",), 2: ("replicate", "shard")}
"""The names of axes by the number of dims. The costs of the axis ``""`` are for all axes."""


def calibrate(
    mesh: Annotated[str, typer.Option(help="ranks, or replicas x shards such as 2x8; all ranks shard by default")] = "",
    names: Annotated[
        str, typer.Option(help="the mesh_dim_names of your mesh, such as dp_replicate,dp_shard", show_default=False)
    ] = "",
    out: Annotated[Path | None, typer.Option(help="the file for set_schedule(costs=...)", show_default=False)] = None,
    rounds: Annotated[int, typer.Option(min=1, help="measurements of each collective; the median counts")] = 5,
    as_json: Json = False,
) -> None:
    """Measure the latency and bandwidth of collectives along each axis of a mesh.

    Rank 0 prints the table, and writes it to OUT. model.set_schedule(costs="costs.json") reads it. The table is for
    meshes with as many ranks as this one.

    Example: torchrun --nproc-per-node 8 -m composable_fsdp calibrate --mesh 2x4 --out costs.json
    """
    ranks = int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else 1
    if ranks < 2:
        raise ConfigurationError(
            "calibrate measures between ranks: torchrun --nproc-per-node N -m composable_fsdp calibrate."
        )
    shape = mesh_shape(mesh or str(ranks))
    if math.prod(shape) != ranks:
        raise ConfigurationError(f"--mesh {mesh} has {math.prod(shape)} ranks, but the job has {ranks}.")
    axes = tuple(names.split(",")) if names else _NAMES[len(shape)]
    if len(set(axes)) != len(shape) or (names and "" in axes):
        raise ConfigurationError(f"--names must have a name for each of {len(shape)} axes, not {names}.")
    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigurationError(f"--out {out}: there is no directory {out.absolute().parent}.")
    device = current_accelerator() or torch.device("cpu")
    costs = measure_costs(init_device_mesh(device.type, shape), axes, rounds)  # starts the default process group
    if dist.get_rank() == 0:
        if out is not None:
            costs.save(out)
        if as_json:
            print_json(asdict(costs))
        else:
            console().print(_table(costs, dict(zip(axes, shape, strict=True))))
            console().print(f"copies in memory: {1e-9 * (costs.copy_bandwidth or 0.0):,.1f} GB/s")
    dist.barrier()
    dist.destroy_process_group()


def measure_costs(mesh: DeviceMesh, names: Sequence[str], rounds: int) -> Costs:
    """Return the costs of the collectives along the axes of ``mesh``. All ranks must call it together and get the same.

    Args:
        mesh: a 1-d mesh (shard) or a 2-d mesh (replicate, shard) without names.
        names: the names of its axes in the table.
        rounds: the number of measurements of each collective. The median counts.
    """
    axes = data_parallel_axes(mesh)
    clock, sizes = Clock(axes.device), message_sizes()
    named = dict(zip(("replicate", "shard")[-mesh.ndim :], names, strict=True))
    costs = {
        (named[name], kind): _measured(communicator, kind, sizes, clock, rounds)
        for name, communicator, kind in collectives_of([axes])
    }
    own = [measure_copies(sizes[-1], clock)]
    own += [each for cost in costs.values() for each in (cost.latency, cost.bandwidth)]
    agreed = iter(over_ranks(medians, own, (axes.shard, axes.replicate), axes.device))
    copy_bandwidth = next(agreed)
    for key in costs:
        costs[key] = CollectiveCost(next(agreed), next(agreed))
    shape = "x".join(map(str, mesh.shape))
    source = f"composable-fsdp calibrate on a mesh of {shape} ranks on {axes.device.type}"
    return Costs(axes_costs(costs), copy_bandwidth=copy_bandwidth, source=source)


def _measured(communicator: Communicator, kind: str, sizes: Sequence[int], clock: Clock, rounds: int) -> CollectiveCost:
    found = [measure_collective(communicator, kind, sizes, clock) for _ in range(rounds)]
    return CollectiveCost(median(each.latency for each in found), median(each.bandwidth for each in found))


def _table(costs: Costs, ranks: dict[str, int]) -> Table:
    numbers = ("latency, µs", "bandwidth, GB/s")
    table = table_of(("axis", "ranks", "collective"), numbers, costs.source)
    for name, axis in costs.axes.items():
        for kind in fields(axis):
            cost = getattr(axis, kind.name)
            figures = (f"{value:,.2f}" for value in (1e6 * cost.latency, 1e-9 * cost.bandwidth))
            table.add_row(name or "all", str(ranks[name]), kind.name.replace("_", "-"), *figures)
    return table
