"""What ``FSDPTesterMixin`` imports and the source distribution of transformers leaves out: ranks on CPU, over gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import multiprocessing


def _get_distributed_device_type() -> str:
    return "cpu"


def _get_distributed_backend() -> str:
    return "gloo"


def _get_rank_device(rank: int) -> torch.device:
    return torch.device("cpu")


def _set_rank_device(rank: int) -> None:
    """Leaves the device as it is: there is one CPU."""


def _start_rank_processes(function: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
    multiprocessing.spawn(function, args=args, nprocs=nprocs)


def run_distributed(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError("only the tests of tensor parallelism call this, and they are not run")
