"""Modules that are imported with the package."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.multiprocess
def test_importing_the_package_imports_no_checkpoint_dependencies() -> None:
    script = (
        "import sys, torch, torch.distributed.tensor\n"
        "names = {'torch.distributed.checkpoint', 'rich', 'safetensors'} - set(sys.modules)\n"
        "import composable_fsdp\n"
        "print(sorted(names & set(sys.modules)))"
    )
    command = [sys.executable, "-W", "ignore", "-c", script]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"
