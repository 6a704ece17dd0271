"""Modules that are imported with the package."""

from __future__ import annotations

import pytest

from tests.helpers.fresh_process import run_program


@pytest.mark.multiprocess
def test_importing_the_package_imports_no_checkpoint_dependencies() -> None:
    script = (
        "import sys, torch, torch.distributed.tensor\n"
        "names = {'torch.distributed.checkpoint', 'rich', 'safetensors'} - set(sys.modules)\n"
        "import composable_fsdp\n"
        "print(sorted(names & set(sys.modules)))"
    )
    done = run_program(script)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
