"""One row of the comparison with torch's FSDP2: a program, and its outcome on each library."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.torch_version import TorchVersion

import composable_fsdp

LIBRARIES: dict[str, Any] = {"torch": torch_fsdp, "here": composable_fsdp}
Library = Any
"""A module with the public names of FSDP2."""

Program = Callable[[Library, DeviceMesh], str]
"""Runs on every rank with a 1-d mesh of all ranks, and returns a short report."""


@dataclass(frozen=True)
class Row:
    """A program and the expected reports of its ranks. ``section``: the title of the table. ``title``: the description
    of the program. ``program``: the function. ``torch``: the description of the outcome on torch's FSDP2.
    ``torch_reports``: a pattern of the reports there. Reports are joined by ``" | "`` in the order of ranks. ``here``:
    the description of the outcome on this library. ``our_reports``: a pattern of the reports here. ``reason``: the
    reason for the difference. ``ranks``: the number of ranks. ``needs``: a package that the program imports and the
    test suite does not require. ``since``: the oldest version of torch on which the program has this outcome, of
    those that were tried."""

    section: str
    title: str
    program: Program
    torch: str
    torch_reports: str
    here: str
    our_reports: str
    reason: str
    ranks: int
    needs: str | None
    since: TorchVersion

    @property
    def name(self) -> str:
        return self.program.__name__


def row(
    title: str,
    *,
    torch: str,
    torch_reports: str,
    here: str,
    reason: str,
    our_reports: str = r"^right( \| right)*$",
    ranks: int = 2,
    needs: str | None = None,
    since: str = "2.11",
) -> Callable[[Program], Row]:
    oldest = TorchVersion(since)

    def made(program: Program) -> Row:
        section = vars(sys.modules[program.__module__])["SECTION"]
        return Row(section, title, program, torch, torch_reports, here, our_reports, reason, ranks, needs, oldest)

    return made


def seeded(build: Callable[[], nn.Module]) -> Any:
    """Return the same values on all ranks."""
    torch.manual_seed(1)
    return build()


def batch(step: int, rank: int, width: int = 6) -> torch.Tensor:
    return torch.randn(3, width, generator=torch.Generator().manual_seed(10 * step + rank))


def compare_gradients(
    model: nn.Module,
    reference: nn.Module,
    loss: Callable[[nn.Module, int], torch.Tensor],
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> str:
    """Return ``right`` if all gradients are those of the mean loss of all ranks, else the first difference. ``model``:
    sharded, after backward. ``reference``: unsharded, with the same values. ``loss``: a function from a model and a
    rank to the loss on the data of the rank."""
    world_size = dist.get_world_size()
    reference.zero_grad()
    for rank in range(world_size):
        (loss(reference, rank) / world_size).backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        expected_gradient = expected[name]
        if gradient is None or expected_gradient is None:
            if gradient is not expected_gradient:
                return f"wrong: {name} has {'no' if gradient is None else 'a'} gradient"
            continue
        full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        if not torch.allclose(full, expected_gradient.to(full.dtype), rtol=rtol, atol=atol):
            return f"wrong: gradient of {name}"
    return "right"
