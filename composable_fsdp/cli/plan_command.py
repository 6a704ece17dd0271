"""``plan``: whether a model fits on its accelerators and how fast it trains, before a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import torch
import typer
from rich.table import Table

from composable_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from composable_fsdp.cli.printing import DTYPES, Json, console, print_json, table_of
from composable_fsdp.plan import Plan, sweep
from composable_fsdp.plan.known_accelerators import as_accelerator
from composable_fsdp.plan.model_inputs import builder_of
from composable_fsdp.plan.plan_values import size_text, time_text
from composable_fsdp.wrap import every_module, transformer_blocks

__all__ = ["plan_model"]

_POLICIES: dict[str, Callable[[], Any]] = {"blocks": transformer_blocks, "modules": every_module, "none": lambda: None}
_RESHARD = {"auto": None, "true": True, "false": False}
_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
_Dtype: TypeAlias = Literal["bf16", "fp16", "fp32"]
_Changed: TypeAlias = Annotated[float | None, typer.Option(help="in place of the device's", show_default=False)]


def plan_model(
    model: Annotated[str, typer.Argument(help="FILE.py:FUNCTION that returns the model", show_default=False)],
    batch: Annotated[
        str, typer.Option(help="the shape of one rank's batch such as 4x4096 or 8x512:bfloat16; int64 by default")
    ] = "1x4096",
    mesh: Annotated[str, typer.Option(help="ranks, or replicas x shards such as 8x64")] = "8",
    device: Annotated[str, typer.Option(help="a100, h100, h200, b200, mi300x or cpu")] = "h100",
    tflops: _Changed = None,
    gbit: _Changed = None,
    gib: _Changed = None,
    dtype: Annotated[_Dtype, typer.Option(help="the dtype of computation")] = "bf16",
    policy: Annotated[
        Literal["blocks", "modules", "none"], typer.Option(help="the groups; none for one group")
    ] = "blocks",
    reshard: Annotated[Literal["auto", "true", "false"], typer.Option(help="reshard after forward")] = "auto",
    optimizer: Annotated[Literal["adamw", "sgd"], typer.Option()] = "adamw",
    recompute: Annotated[bool, typer.Option("--recompute", help="recompute the forward of each group")] = False,
    offload: Annotated[bool, typer.Option("--offload", help="keep shards and optimizer state in host memory")] = False,
    is_sharded: Annotated[bool, typer.Option("--sharded", help="FUNCTION calls fully_shard itself")] = False,
    sweeps: Annotated[bool, typer.Option("--sweep", help="try resharding and recomputation on and off")] = False,
    out: Annotated[Path | None, typer.Option(help="write a report .html, .png or .json", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Tell if a model fits and how fast it would train, without its memory and without other ranks.

    Builds the model and runs it on tensors without memory, on one core.

    Examples:

    composable-fsdp plan train.py:build --batch 4x2048 --mesh 8x64 --device h100

    composable-fsdp plan train.py:build --mesh 1024 --recompute --out plan.html
    """
    build = builder_of(model)
    figures: dict[str, Any] = {"tflops": tflops, "gbit": gbit, "gib": gib}
    accelerator = replace(
        as_accelerator(device), **{name: value for name, value in figures.items() if value is not None}
    )
    options: dict[str, Any] = {"mesh": mesh, "device": accelerator, "optimizer": _OPTIMIZERS[optimizer]}
    settings: dict[str, Sequence[Any]] = {"recompute": [False, True] if sweeps else [recompute]}
    if not is_sharded:
        options |= {"policy": _POLICIES[policy](), "reshard_after_forward": _RESHARD[reshard]}
        options["mp_policy"] = MixedPrecisionPolicy(DTYPES[dtype], torch.float32)
        options["offload_policy"] = CPUOffloadPolicy() if offload else None
        if sweeps:
            settings["reshard_after_forward"] = [True, False]
    options = {name: value for name, value in options.items() if value is not None}
    found = sweep(build, batch, settings, **options)
    best = found[0][1]
    if out is not None:
        best.save(out)
    if as_json:
        print_json([{"settings": each, **made.as_dict()} for each, made in found] if sweeps else best.as_dict())
    elif sweeps:
        console().print(_table(found))
    else:
        console().print(str(best))


def _table(found: Sequence[tuple[dict[str, Any], Plan]]) -> Table:
    best = found[0][1]
    title = f"{best.model} on {best.mesh} ranks: {best.summary()['dtypes']}"
    table = table_of(("settings", "fits"), ("memory", "step", "exposed"), title)
    for settings, made in found:
        text = ", ".join(f"{name}={value}" for name, value in settings.items())
        figures = (size_text(made.peak_bytes), time_text(made.seconds), time_text(made.exposed))
        table.add_row(text, "yes" if made.fits else "no", *figures)
    return table
