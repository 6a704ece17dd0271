"""Collects the rows of the comparison, and runs one row on a rank."""

from __future__ import annotations

import warnings
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from io import StringIO

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.helpers.comparison import extensions, gradients, parameters
from tests.helpers.comparison.rows import LIBRARIES, Row

ROWS = {
    each.name: each
    for module in (gradients, parameters, extensions)
    for each in vars(module).values()
    if isinstance(each, Row)
}
"""Maps the name of each program to its row, in the order of the page."""

_SECONDS = 3.0
"""The timeout of the mesh's process group, after which a waiting rank raises."""


def play(name: str, library: str) -> str:
    """Run the program of a row on this rank, and return its report or the exception that it raised."""
    group = dist.new_group(timeout=timedelta(seconds=_SECONDS))
    mesh = DeviceMesh.from_group(group, "cpu")
    with warnings.catch_warnings(), redirect_stderr(StringIO()), redirect_stdout(StringIO()):  # torch prints stacks
        warnings.simplefilter("ignore")
        try:
            return ROWS[name].program(LIBRARIES[library], mesh)
        except Exception as error:  # the report of a program that fails is its error
            return f"{type(error).__name__}: {error}"
