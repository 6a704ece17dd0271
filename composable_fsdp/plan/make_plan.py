"""``plan`` and ``sweep``: the memory and the time of a training step, before a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch
from torch import nn

from composable_fsdp.errors import ConfigurationError
from composable_fsdp.plan.known_accelerators import Accelerator, KnownAccelerator, as_accelerator
from composable_fsdp.plan.memory_ledger import KINDS
from composable_fsdp.plan.model_inputs import Batch, as_loss, without_cache
from composable_fsdp.plan.plan_advice import CHANGES, PERSISTENT, advise, offload_seconds
from composable_fsdp.plan.plan_values import Plan, Row
from composable_fsdp.plan.rehearsal import rehearse
from composable_fsdp.plan.simulated_job import mesh_shape
from composable_fsdp.policies import CPUOffloadPolicy

__all__ = ["plan", "sweep"]


def plan(
    build: Callable[[], nn.Module],
    batch: Batch,
    *,
    mesh: str = "8",
    device: Accelerator | KnownAccelerator = "h100",
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
    loss: Callable[[Any], torch.Tensor] = as_loss,
    recompute: bool = False,
    chooses: bool | None = None,
    **options: Any,
) -> Plan:
    """Predict the memory and the time of a training step of each rank of a job, without running the job.

    The model is built, sharded and run on tensors without memory (``FakeTensorMode``), as the first of the ranks. Its
    memory is counted operation by operation, and the time is that of the simulated schedule.

    Args:
        build: returns the model, unsharded, or sharded by ``fully_shard`` on the default mesh.
        batch: the batch of one rank: a tensor, a shape such as ``"4x4096"`` (int64) or ``"8x512:bfloat16"``, a
            sequence or mapping of these with the arguments of the model, or a function that returns one. A shape alone
            is also the ``labels`` of a model that takes ``input_ids`` and ``labels``.
        mesh: the ranks, such as ``"64"``, or replicas x shards, such as ``"8x64"``.
        device: the accelerator of each rank, or the name of a known one: "a100", "h100", "h200", "b200", "mi300x",
            "cpu".
        optimizer: makes the optimizer of the model's parameters.
        loss: returns the loss in what the model returns: by default its ``loss``, or a mean.
        recompute: run the forward of each group within the model again in backward, as under activation checkpointing.
        chooses: let the second step have the settings that are chosen by costs, as steps of a job on an accelerator
            have from the fifth on. By default on devices with streams.
        options: the keywords of ``fully_shard``, except ``mesh`` and ``device``.

    Raises:
        ConfigurationError: an argument is invalid, or the model cannot run without values of tensors.
        LifecycleError: this process has a process group.
    """
    mesh_shape(mesh)
    accelerator = as_accelerator(device)
    settings = {"recompute": recompute, **options} if recompute else options
    if isinstance(options.get("offload_policy"), Mapping):
        raise ConfigurationError(
            "plan counts the offload of all parameters or of none, and no offload_policy by name. Plan with "
            "offload_policy=CPUOffloadPolicy() and without: the memory and the time of a part are between the two."
        )
    offloads = isinstance(options.get("offload_policy"), CPUOffloadPolicy)
    name = "the model"

    def build_named() -> nn.Module:
        nonlocal name
        model = build()
        name = type(model).__name__.removeprefix("FSDP")
        return model

    run = partial(
        rehearse,
        batch=batch,
        mesh=mesh,
        accelerator=accelerator,
        optimizer=optimizer,
        loss=loss,
        recompute=recompute,
        chooses=accelerator.has_streams if chooses is None else chooses,
        changes=CHANGES,
        # The device of the simulated job is the host: what is offloaded is counted by its kind.
        options={key: value for key, value in options.items() if not offloads or key != "offload_policy"},
    )
    rehearsal = run(build_named)
    uncached = run(partial(without_cache, build)) if rehearsal.keeps_cache else None
    peak, timeline = rehearsal.peak, rehearsal.timeline
    offload = options.get("offload_policy")
    on_host = sum(peak.largest[kind] for kind in PERSISTENT) if offloads else 0
    if isinstance(offload, CPUOffloadPolicy) and offload.pin_memory:
        on_host += rehearsal.pinned_waste
    rows = [
        Row(kind, 0 if offloads and kind in PERSISTENT else peak.nbytes[kind], peak.largest[kind]) for kind in KINDS
    ]
    rows.append(Row("fragmentation", peak.fragmentation, peak.fragmentation))
    copies = offload_seconds(rehearsal, accelerator) if offloads else 0.0
    seconds = timeline.seconds + copies + (0.0 if offloads else rehearsal.optimizer_seconds)
    return Plan(
        model=name,
        parameters=rehearsal.parameters,
        groups=rehearsal.groups,
        mesh=mesh,
        device=accelerator,
        settings={key: str(value) for key, value in settings.items()},
        dtypes=rehearsal.dtypes,
        keeps_cache=rehearsal.keeps_cache,
        rows=tuple(rows),
        peak_bytes=sum(row.bytes for row in rows[:-1]),
        peak_place=peak.place,
        host_bytes=on_host,
        seconds=seconds,
        exposed=timeline.exposed + copies,
        mfu=rehearsal.flops / (seconds * accelerator.tflops * 1e12) if seconds else 0.0,
        advice=advise(rehearsal, uncached, accelerator, mesh, options, recompute=recompute),
        spans=timeline.spans,
        curve=peak.curve,
    )


def sweep(
    build: Callable[[], nn.Module], batch: Batch, settings: Mapping[str, Sequence[Any]], **common: Any
) -> list[tuple[dict[str, Any], Plan]]:
    """Return a plan for each combination of ``settings``: those that fit first, and the fastest of them first.

    Args:
        build: as for :func:`plan`.
        batch: as for :func:`plan`.
        settings: the values to try of each keyword of :func:`plan`, such as ``{"recompute": [False, True]}``.
        common: the other keywords of :func:`plan`.

    Raises:
        ConfigurationError: as for :func:`plan`; or ``settings`` has no values.
    """
    if not settings or not prod(map(len, settings.values())):
        raise ConfigurationError("sweep needs at least one value for each of at least one setting.")
    chosen = [dict(zip(settings, values, strict=True)) for values in product(*settings.values())]
    found = [(each, plan(build, batch, **{**common, **each})) for each in chosen]
    return sorted(found, key=lambda pair: (not pair[1].fits, pair[1].seconds))
