"""``plan``: whether a model fits on its accelerators and how fast it trains, before a run.

``composable_fsdp.plan`` is imported when the command runs: some builds of torch log that they miss triton when it is.
The help needs no torch.
"""

from __future__ import annotations

import importlib
import logging
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
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


def plan_model(model: str, batch: str, mesh: str, device: str, as_json: bool, **given: Any) -> int:
    """Tell if a model fits and how fast it would train, without its memory and without other ranks.

    Builds the model and runs it on tensors without memory, on one core. Exit code 1 if it does not fit. Then the last
    line is the cheapest set of options that fits: the one with the shortest step.

    Example: composable-fsdp plan train.py:build --batch 4x2048 --mesh 8x64 --device h100-80gb
    """
    if batch.isdecimal():
        raise ConfigurationError(
            f"--batch {batch} has one number, but BATCHxTOKENS is expected, such as 1x{batch}. A batch of one dim is "
            f"{batch}:int64."
        )
    with _only_own_warnings():
        import torch

        from composable_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, plan, wrap
        from composable_fsdp.plan.known_accelerators import as_accelerator

        build = builder_of(model)
        figures = {name: given[name] for name in _FIGURES if given[name] is not None}
        options: dict[str, Any] = {"mesh": mesh, "device": replace(as_accelerator(device), **figures)}
        options["optimizer"] = getattr(torch.optim, _OPTIMIZERS[given["optimizer"]])
        # Without recomputation less memory is needed only if parameters were kept after forward.
        every: dict[str, Sequence[Any]] = {"recompute": [False, True] if given["reshard"] == "false" else [True]}
        if not given["sharded"]:
            if policy := _POLICIES[given["policy"]]:
                options["policy"] = getattr(wrap, policy)()
            options["reshard_after_forward"] = _RESHARD[given["reshard"]]
            options["mp_policy"] = MixedPrecisionPolicy(getattr(torch, _DTYPES[given["dtype"]]), torch.float32)
            options["offload_policy"] = CPUOffloadPolicy() if given["offload"] else None
            every["reshard_after_forward"] = [True, False]
        options = {name: value for name, value in options.items() if value is not None}
        made = plan.plan(build, batch, recompute=given["recompute"], **options)
        if as_json:
            printing.show_json(made.as_dict())
            return int(not made.fits)
        printing.show(str(made))
        if made.fits:
            return 0
        sys.stdout.flush()
        printing.show_error("planning with other options, which takes as long for each ...")
        tried = plan.sweep(build, batch, every, **options)
        if not (tried[0][1].fits or given["sharded"] or given["offload"]):
            every |= {"reshard_after_forward": [True], "offload_policy": [CPUOffloadPolicy()]}
            tried = plan.sweep(build, batch, every, **options)
    printing.show(f"\n{_cheapest(*tried[0])}")
    return 1


def _cheapest(settings: Mapping[str, Any], made: Plan) -> str:
    """Return the last line: the options of the fastest of the plans that fit, or that none fits."""
    from composable_fsdp.plan.plan_values import size_text, time_text

    if not made.fits:
        return "no set of --recompute, --reshard and --offload fits: take more ranks (--mesh), or a smaller --batch"
    flags = ["--recompute"] * settings["recompute"] + ["--offload"] * ("offload_policy" in settings)
    if "reshard_after_forward" in settings:
        flags.append(f"--reshard {str(settings['reshard_after_forward']).lower()}")
    memory, step = size_text(made.peak_bytes), time_text(made.seconds)
    text = " ".join(flags) or "without --recompute"
    return f"cheapest set that fits: {text} ({memory}, {100 * made.share:.0f} %, {step} per step)"


@contextmanager
def _only_own_warnings() -> Iterator[None]:
    """Silence warnings and logs of other libraries: they are about a run, and this is none."""

    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        if category.__module__.startswith("composable_fsdp."):
            printing.show_error(f"warning: {message}")

    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.showwarning = show
            yield
    finally:
        logging.disable(level)


def builder_of(text: str) -> Callable[[], nn.Module]:
    """Return what builds the model: ``text`` is ``file.py:function`` or ``package.module:function``.

    A function in a class is named with it, such as ``file.py:Model.small``.

    Raises:
        ConfigurationError: there is no such function, or the file cannot be imported.
    """
    path, _, name = text.rpartition(":")
    if not path:
        raise ConfigurationError(f"{text!r} is no FILE.py:FUNCTION.")
    is_file = path.endswith(".py")
    if is_file and not Path(path).is_file():
        raise ConfigurationError(f"there is no file {path}.")
    found: Any
    try:
        if is_file:
            sys.path.insert(0, str(Path(path).resolve().parent))
            found = runpy.run_path(path, run_name="<plan>").get(name.split(".")[0])
        else:
            found = getattr(importlib.import_module(path), name.split(".")[0], None)
    except Exception as error:
        reason = f"{type(error).__name__}: {printing.first_line(str(error))}"
        raise ConfigurationError(f"{path} cannot be imported: {reason}") from error
    for inner in name.split(".")[1:]:
        found = getattr(found, inner, None)
    if not callable(found):
        raise ConfigurationError(f"{path} has no function {name!r}.")
    build: Callable[[], nn.Module] = found
    return build
