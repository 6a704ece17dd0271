"""``plan``: whether a model fits on its accelerators and how fast it trains, before a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from composable_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from composable_fsdp.cli.printing import Json, console, print_json
from composable_fsdp.errors import ConfigurationError
from composable_fsdp.plan import Accelerator, Plan, plan, sweep
from composable_fsdp.plan.known_accelerators import as_accelerator
from composable_fsdp.plan.model_inputs import builder_of
from composable_fsdp.plan.plan_values import size_text, time_text
from composable_fsdp.wrap import every_module, transformer_blocks

__all__ = ["plan_model"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_POLICIES: dict[str, Callable[[], Any]] = {"blocks": transformer_blocks, "modules": every_module, "none": lambda: None}
_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


def plan_model(
    model: Annotated[
        str,
        typer.Argument(
            help="FILE.py:FUNCTION that returns the model, or a config.json of transformers", show_default=False
        ),
    ],
    batch: Annotated[
        str, typer.Option(help="the shape of one rank's batch such as 4x4096 or 8x512:bfloat16; int64 by default")
    ] = "1x4096",
    mesh: Annotated[str, typer.Option(help="ranks, or replicas x shards such as 8x64")] = "8",
    device: Annotated[str, typer.Option(help="a100, h100, h200, b200, mi300x or cpu")] = "h100",
    tflops: Annotated[float | None, typer.Option(help="in place of the device's", show_default=False)] = None,
    gbit: Annotated[float | None, typer.Option(help="in place of the device's", show_default=False)] = None,
    gib: Annotated[float | None, typer.Option(help="in place of the device's", show_default=False)] = None,
    dtype: Annotated[str, typer.Option(help="the dtype of computation: bf16, fp16 or fp32")] = "bf16",
    param_dtype: Annotated[
        str | None,
        typer.Option(
            help="the dtype of the shards and of the optimizer state: bf16, fp16 or fp32; by default fp32 for a "
            "config.json, and what FUNCTION returns",
            show_default=False,
        ),
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="build the model with config.use_cache = False, as for training")
    ] = False,
    policy: Annotated[str, typer.Option(help="the groups: blocks, modules, or none for one group")] = "blocks",
    reshard: Annotated[str, typer.Option(help="reshard after forward: auto, true or false")] = "auto",
    optimizer: Annotated[str, typer.Option(help="adamw or sgd")] = "adamw",
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

    composable-fsdp plan config.json --mesh 1024 --recompute --out plan.html
    """
    if is_sharded and param_dtype is not None:
        raise ConfigurationError("--param-dtype is for unsharded models: with --sharded, FUNCTION chooses the dtype.")
    shards = None if param_dtype is None else _choice("--param-dtype", param_dtype, _DTYPES)
    build = builder_of(model, param_dtype=shards, keeps_cache=not no_cache)
    given = {"tflops": tflops, "gbit": gbit, "gib": gib}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    accelerator: Accelerator = replace(as_accelerator(device), **changes)
    options: dict[str, Any] = {}
    if not is_sharded:
        options = _options(dtype, policy, reshard, offload=offload)
    arguments: dict[str, Any] = {
        "mesh": mesh,
        "device": accelerator,
        "optimizer": _choice("--optimizer", optimizer, _OPTIMIZERS),
        **options,
    }
    if not sweeps:
        made = plan(build, batch, recompute=recompute, **arguments)
        _report(made, out)
        if as_json:
            print_json(made.as_dict())
        else:
            console().print(str(made))
        return
    settings: dict[str, Sequence[Any]] = {"recompute": [False, True]}
    if not is_sharded:
        settings["reshard_after_forward"] = [True, False]
        arguments.pop("reshard_after_forward", None)
    found = sweep(build, batch, settings, **arguments)
    _report(found[0][1], out)
    if as_json:
        print_json([{"settings": each, **made.as_dict()} for each, made in found])
    else:
        _show(found)


def _options(dtype: str, policy: str, reshard: str, *, offload: bool) -> dict[str, Any]:
    """Return the keywords of ``fully_shard`` for the options of the command."""
    chosen, groups = _choice("--dtype", dtype, _DTYPES), _choice("--policy", policy, _POLICIES)()
    resharding = _choice("--reshard", reshard, {"auto": None, "true": True, "false": False})
    options: dict[str, Any] = {"policy": groups, "reshard_after_forward": resharding}
    options["mp_policy"] = MixedPrecisionPolicy(chosen, torch.float32)
    if offload:
        options["offload_policy"] = CPUOffloadPolicy()
    return {name: value for name, value in options.items() if value is not None}


def _choice(option: str, value: str, known: dict[str, Any]) -> Any:
    if value not in known:
        raise ConfigurationError(f"{option} must be one of {', '.join(known)}, not {value}.")
    return known[value]


def _report(made: Plan, out: Path | None) -> None:
    if out is not None:
        made.save(out)


def _show(found: Sequence[tuple[dict[str, Any], Plan]]) -> None:
    best = found[0][1]
    title = f"{best.model} on {best.mesh} ranks: {best.summary()['dtypes']}"
    table = Table("settings", "fits", title=title, title_justify="left")
    for column in ("memory", "step", "exposed"):
        table.add_column(column, justify="right")
    for settings, made in found:
        text = ", ".join(f"{name}={value}" for name, value in settings.items())
        figures = (size_text(made.reserved_bytes), time_text(made.seconds), time_text(made.exposed))
        table.add_row(text, "yes" if made.fits else "no", *figures)
    console().print(table)
