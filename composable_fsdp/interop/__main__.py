"""``python -m composable_fsdp.interop script.py ...`` runs a program with torch's ``fully_shard`` replaced by ours.

As with ``python`` itself, ``-m module`` runs a module. With ``torchrun``: ``torchrun ... -m composable_fsdp.interop
script.py ...``.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from composable_fsdp.interop._patch import patch_torch

__all__ = ["main"]


def main() -> None:
    """Run the program that the command line names as ``__main__``, with the arguments that follow."""
    _, *program = sys.argv
    as_module = program[:1] == ["-m"]
    sys.argv = program[1:] if as_module else program
    if not sys.argv:
        sys.exit("usage: python -m composable_fsdp.interop (script.py | -m module) [argument ...]")
    patch_torch()
    if as_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)  # as of ``python script.py``
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
