"""Starts and ends the example programs: process group, device, exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .options import UsageError

T = TypeVar("T")
PROGRAM = Path(sys.argv[0]).name


def launch(run: Callable[[], int], make_parser: Callable[[], argparse.ArgumentParser]) -> int:
    """Call ``run`` in a process group of all ranks, and return the exit code; 2 means that it could not start."""
    if "RANK" not in os.environ:
        return _explain(make_parser)
    accelerator = usable_accelerator()
    # An accelerator needs both backends: checkpoints and offloaded gradients communicate from the CPU.
    backend = f"cpu:gloo,{accelerator}:{dist.get_default_backend_for_device(accelerator)}" if accelerator else "gloo"
    store, rank, world_size = next(dist.rendezvous("env://"))
    # The store of torchrun survives a restart, so gloo would find addresses of processes that have ended in it.
    store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    try:
        code = run()
    except UsageError as error:
        if dist.get_rank() == 0:
            print(f"{PROGRAM}: {error}", file=sys.stderr, flush=True)
        code = 2
    # torchrun stops all ranks when one has failed, so they end together, after the output of rank 0. The barrier has no
    # tensor, because gloo's thread might release it while Python ends, which aborts the process. It uses gloo, because
    # ranks without a usable device cannot communicate on one.
    dist.barrier(dist.new_group(backend="gloo"))
    dist.destroy_process_group()
    return code


def _explain(make_parser: Callable[[], argparse.ArgumentParser]) -> int:
    """Make the process group. Without torchrun there is none, so that ``--help`` works."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        make_parser().print_help()
        return 0
    start = "torchrun --standalone --nproc-per-node 2"
    print(f"{PROGRAM}: start it with torchrun: {start} {' '.join(sys.argv)}", file=sys.stderr)
    return 2


def usable_accelerator() -> str | None:
    """Return the accelerator's device type, or None if process groups cannot use one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and found.type != "mps" else None


def choose_device(name: str) -> torch.device:
    """Return this rank's device, and make an accelerator the current device."""
    accelerator = usable_accelerator()
    wanted = (accelerator or "cpu") if name == "auto" else name
    if wanted == "cpu":
        return torch.device("cpu")
    if wanted != accelerator:
        raise UsageError(
            f"--device {name} is not usable here: choose auto, cpu{f' or {accelerator}' if accelerator else ''}"
        )
    local_rank, devices = int(os.environ["LOCAL_RANK"]), torch.accelerator.device_count()
    if int(os.environ["LOCAL_WORLD_SIZE"]) > devices:
        raise UsageError(
            f"there are more ranks than {wanted} devices ({devices}): start {devices}, or use --device cpu"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(wanted, local_rank)


def from_rank_0(look: Callable[[], T]) -> T:
    """Call ``look`` on rank 0 only, because it accesses files. All ranks return its result or raise its error."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer = [look(), None]
        except UsageError as error:
            answer = [None, error]
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    found: T = answer[0]
    return found
