"""Runs the console command in this process."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from composable_fsdp.cli import main


class Done(NamedTuple):
    """The exit code and the output of a command, and the exception that it left to Python."""

    exit_code: int
    stdout: str
    stderr: str
    exception: BaseException | None = None


def run_command(*arguments: str | Path, environment: Mapping[str, str] | None = None) -> Done:
    """Run ``composable-fsdp`` with ``arguments``, and with ``environment`` added to that of this process."""
    code, exception = 0, None
    variables = mock.patch.dict(os.environ, environment or {})
    with variables, redirect_stdout(io.StringIO()) as stdout, redirect_stderr(io.StringIO()) as stderr:
        try:
            main(arguments=list(map(str, arguments)))
        except SystemExit as end:
            code = int(end.code or 0)
        except Exception as error:
            code, exception = 1, error
    return Done(code, stdout.getvalue(), stderr.getvalue(), exception)
