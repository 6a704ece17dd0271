"""Runs short programs in new processes that have imported torch, but not this library.

The import of torch takes most of the time of a short program. So one server process imports it, and forks for every
program. The server ends with the process that uses it.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

__all__ = ["run_module", "run_program"]

ROOT = Path(__file__).parents[2]


def run_module(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a module as ``python -m`` does."""
    program = f"import runpy\nrunpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
    return run_program(program, *arguments)


def run_program(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python code as ``python -W ignore -c`` does, and return its exit code and output."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        request = {"program": program, "arguments": list(map(str, arguments)), "outputs": list(map(str, outputs))}
        server.stdin.write(f"{json.dumps(request)}\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(program, code, *(path.read_text() for path in outputs))


@lru_cache(maxsize=1)
def _server() -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", __file__]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def serve() -> str:
    """Fork for every request. The server ends here at the end of its input; a child returns with its program."""
    while line := sys.stdin.readline():
        request = json.loads(line)
        child = os.fork()
        if not child:
            for descriptor, path in enumerate((os.devnull, *request["outputs"])):
                os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
            sys.argv = ["-c", *request["arguments"]]
            program: str = request["program"]
            return program
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)  # noqa: T201
    sys.exit()


if __name__ == "__main__":
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401

    gc.freeze()  # a collection in a child would copy all pages of the server
    sys.path[0] = str(ROOT)
    # An exception of the program leaves this module, so Python ends as it does after an exception of any program.
    exec(compile(serve(), "<string>", "exec"), {"__name__": "__main__"})
