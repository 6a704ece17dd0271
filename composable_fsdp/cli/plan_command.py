"""``plan``: whether a model fits on its accelerators and how fast it trains, before a run.

``composable_fsdp.plan`` is imported when the command runs: the help needs no torch.
"""

from __future__ import annotations

import importlib
import runpy
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from composable_fsdp.cli import printing
from composable_fsdp.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import nn

    from composable_fsdp.plan import Plan

_POLICIES = {"blocks": "transformer_blocks", "modules": "every_module", "none": ""}
"""The names in composable_fsdp.wrap."""
_RESHARD = {"auto": None, "true": True, "false": False}
_OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD"}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_RECOMPUTED = {"recompute": True, "reshard": "true"}
_OTHER_OPTIONS: tuple[dict[str, Any], ...] = (
    *({"reshard": "true"}, {"recompute": True, "reshard": "false"}, _RECOMPUTED, {**_RECOMPUTED, "offload": True}),
)
"""The options that are tried if a model does not fit. Those that cost the least time come first."""
_FIGURES = ("tflops", "gbit", "gib", "ranks_per_host")


def add_commands(commands: printing.Commands) -> None:
    parser = printing.add_command(commands, "plan", plan_model, has_json=True)
    add = parser.add_argument
    add("model", help="FILE.py:FUNCTION, FILE.py:CLASS.METHOD or MODULE:FUNCTION, which returns the model")
    shape = "the shape of one rank's batch, such as 4x4096 or 8x512:bfloat16; int64 by default (%(default)s)"
    add("--batch", default="1x4096", metavar="BATCHxTOKENS", help=shape)
    add("--mesh", default="8", help="ranks, or replicas x shards such as 8x64 (%(default)s)")
    known = "a100-80gb, h100-80gb, h200-141gb, b200-180gb, mi300x-192gb or cpu (%(default)s)"
    add("--device", default="h100-80gb", help=known)
    instead = "in place of the device's (of an h100-80gb"
    add("--tflops", type=float, help=f"dense 10^12 operations per second in bf16, {instead}: 989)")
    add("--gbit", type=float, help=f"10^9 bits per second that a rank sends to other hosts, {instead}: 400)")
    add("--gib", type=float, help=f"GiB of memory of a rank, {instead}: 74.5)")
    add("--ranks-per-host", type=int, metavar="RANKS", help=f"ranks of a host, {instead}: 8)")
    add("--dtype", choices=_DTYPES, default="bf16", help="the dtype of computation (%(default)s)")
    add("--policy", choices=_POLICIES, default="blocks", help="the groups; none for one group (%(default)s)")
    add("--reshard", choices=_RESHARD, default="auto", help="reshard after forward (%(default)s)")
    add("--optimizer", choices=_OPTIMIZERS, default="adamw", help="(%(default)s)")
    add("--recompute", action="store_true", help="recompute the forward of each group")
    add("--offload", action="store_true", help="keep shards and optimizer state in host memory")
    add("--sharded", action="store_true", help="FUNCTION calls fully_shard itself")


def plan_model(model: str, as_json: bool, **given: Any) -> int:
    """Tell if a model fits and how fast it would train, without its memory and without other ranks.

    Builds the model and runs it on tensors without memory, on one core. Exit code 1 if it does not fit. Then the last
    line has options with which it fits, if there are any.

    Example: composable-fsdp plan train.py:build --batch 4x2048 --mesh 8x64 --device h100-80gb
    """
    if given["batch"].isdecimal():
        tokens = given["batch"]
        raise ConfigurationError(
            f"--batch {tokens} has one number, but BATCHxTOKENS is expected, such as 1x{tokens}. A batch of one dim is "
            f"{tokens}:int64."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are about a run, and this is none
        build = builder_of(model)
        made = _plan(build, given)
        if as_json:
            printing.show_json(made.as_dict())
            return int(not made.fits)
        printing.show(str(made))
        if made.fits:
            return 0
        sys.stdout.flush()
        printing.show_error("planning with other options, which takes as long for each ...")
        for changes in ({"recompute": True},) if given["sharded"] else _OTHER_OPTIONS:
            tried = _plan(build, given | changes)
            if tried.fits:
                flags = [f"--{name}" if value is True else f"--{name} {value}" for name, value in changes.items()]
                step = f"{1e3 * tried.seconds:.0f} ms per step"
                printing.show(f"\nfits with {' '.join(flags)}: {tried.memory_text()}, {step}")
                return 1
    printing.show(
        "\nno set of --recompute, --reshard and --offload fits: take more ranks (--mesh), or a smaller --batch"
    )
    return 1


def _plan(build: Callable[[], nn.Module], given: Mapping[str, Any]) -> Plan:
    import torch

    from composable_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, plan, wrap
    from composable_fsdp.plan.known_accelerators import as_accelerator

    figures = {name: given[name] for name in _FIGURES if given[name] is not None}
    options: dict[str, Any] = {}
    if not given["sharded"]:
        policy = _POLICIES[given["policy"]]
        options["policy"] = getattr(wrap, policy)() if policy else None
        options["reshard_after_forward"] = _RESHARD[given["reshard"]]
        options["mp_policy"] = MixedPrecisionPolicy(getattr(torch, _DTYPES[given["dtype"]]), torch.float32)
        options["offload_policy"] = CPUOffloadPolicy() if given["offload"] else None
    return plan.plan(
        build,
        given["batch"],
        mesh=given["mesh"],
        device=replace(as_accelerator(given["device"]), **figures),
        optimizer=getattr(torch.optim, _OPTIMIZERS[given["optimizer"]]),
        recompute=given["recompute"],
        **{name: value for name, value in options.items() if value is not None},
    )


def builder_of(text: str) -> Callable[[], nn.Module]:
    """Return what builds the model: ``text`` is ``file.py:function`` or ``package.module:function``.

    A function in a class is named with it, such as ``file.py:Model.small``.

    Raises:
        ConfigurationError: there is no such function, or the file cannot be imported.
    """
    path, _, name = text.rpartition(":")
    try:
        if path.endswith(".py"):
            sys.path.insert(0, str(Path(path).resolve().parent))
            found: Any = SimpleNamespace(**runpy.run_path(path, run_name="<plan>"))
        else:
            found = importlib.import_module(path)
        for inner in name.split("."):
            found = getattr(found, inner)
    except Exception as error:
        reason = f"{type(error).__name__}: {printing.first_line(str(error))}"
        raise ConfigurationError(f"{text!r} is no FILE.py:FUNCTION or MODULE:FUNCTION: {reason}") from error
    if not callable(found):
        raise ConfigurationError(f"{path} has no function {name!r}.")
    build: Callable[[], nn.Module] = found
    return build
