"""Takes the host for an accelerator in ``offload_optimizer``, which moves no state of parameters on the host."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch
from torch.optim import Optimizer

from composable_fsdp import offload_optimizer

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


@contextmanager
def host_as_device() -> Iterator[None]:
    """Have ``offload_optimizer`` move the state of parameters on the host."""
    names = {"is_host": lambda _: False}
    synchronize = mock.patch.object(torch.cpu.Stream, "synchronize", create=True)
    with synchronize, mock.patch.dict(inspect.unwrap(offload_optimizer).__globals__, names):
        yield


def offload(optimizer: OptimizerT, **options: Any) -> OptimizerT:
    return offload_optimizer(optimizer, pin_memory=False, **options)
