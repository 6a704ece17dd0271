"""Runs every row of ``docs/generated/compared-with-fsdp2.md`` on torch's FSDP2 and on this library."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.helpers.comparison.catalogue import ROWS, play
from tests.helpers.rank_process import RanksError
from tests.helpers.run_ranks import run_ranks

SECONDS = 8.0
"""The timeout of a program, sufficient on a busy machine. Programs that hang on torch use all of it."""


def reports(name: str, library: str) -> str:
    try:
        return " | ".join(run_ranks(play, ROWS[name].ranks, name, library, timeout=SECONDS))
    except RanksError as error:
        return str(error)


def check(name: str, library: str, pattern: str) -> None:
    needed = ROWS[name].needs
    if needed is not None and find_spec(needed) is None:
        pytest.skip(f"needs {needed}: make install")
    found = reports(name, library)
    assert re.search(pattern, found), found


@pytest.mark.parametrize("name", ROWS)
def test_torch_behaves_as_the_comparison_page_says(name: str) -> None:
    if TorchVersion(torch.__version__) < ROWS[name].since:
        pytest.skip(f"the page says it of torch from {ROWS[name].since} on")
    check(name, "torch", ROWS[name].torch_reports)


@pytest.mark.parametrize("name", ROWS)
def test_this_library_behaves_as_the_comparison_page_says(name: str) -> None:
    check(name, "here", ROWS[name].our_reports)
