"""Runs programs in new processes that have imported torch, but not this library. The import of torch takes most of the
time of a short program. So one server process imports it, and forks for every program, or for each of its ranks. The
server ends with the process that uses it."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import torch.distributed as dist

ROOT = Path(__file__).parents[2]


def run_module(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_program(_of_module(name), *arguments)


def _of_module(name: str) -> str:
    return f"import runpy\nrunpy.run_module({name!r}, run_name='__main__', alter_sys=True)"


def run_program(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python code as ``python -W ignore -c`` does, and return its exit code and output."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        (code,) = _run(program, arguments, outputs, [{}], 600.0)
        return subprocess.CompletedProcess(program, code, *(path.read_text() for path in outputs))


class Program:
    """A module that runs as ``python -m`` does, until it ends or a signal ends it. ``outputs``: the files that its
    stdout and stderr are appended to. ``environment``: variables in addition to those of this process when it first ran
    a program."""

    def __init__(
        self, name: str, *arguments: str | Path, outputs: tuple[Path, Path], environment: Mapping[str, str]
    ) -> None:
        self._code: int | None = None
        (self.pid,) = _ask(_request(_of_module(name), arguments, outputs, [environment]) | {"starts": True})

    def send_signal(self, number: int) -> None:
        if self._code is None:
            os.kill(self.pid, number)

    def wait(self, seconds: float = 300.0) -> int:
        """Wait for the end, and return the exit code, negative for a signal. Kills the program after ``seconds``."""
        if self._code is None:
            (self._code,) = _ask({"collects": self.pid, "seconds": seconds})
        return self._code


def run_script_on_ranks(
    script: str | Path,
    *arguments: str,
    ranks: int = 2,
    timeout: float = 200.0,
    fails: bool = False,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Run a script on ``ranks`` processes with the variables of torchrun, and return their stdout and stderr.
    ``environment`` has variables in addition to these, and to those of this process when it first ran a program. It
    saves the launcher, and the import of torch in each process, which take most of the time of a short example. The
    exit codes must be 0. If one is not, or after ``timeout`` seconds, the other processes are killed. With ``fails``,
    one must not be, and the others end by themselves."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as the agent of torchrun has it
    path = ROOT / script
    program = (
        f"import os, runpy, sys\nos.chdir({str(ROOT)!r})\nsys.argv[0] = {str(path)!r}\n"
        f"sys.path.insert(0, {str(path.parent)!r})\nrunpy.run_path({str(path)!r}, run_name='__main__')"
    )
    job: dict[str, object] = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    job |= {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_RUN_ID": "none"}
    job |= environment
    environments = [
        {name: str(value) for name, value in {**job, "RANK": rank, "LOCAL_RANK": rank}.items()} for rank in range(ranks)
    ]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        codes = _run(program, arguments, [output, output], environments, timeout, waits=fails)
        said = output.read_text()
    assert any(codes) == fails, said
    return said


def _run(
    program: str,
    arguments: Sequence[str | Path],
    outputs: Sequence[Path],
    environments: Sequence[Mapping[str, str]],
    seconds: float,
    *,
    waits: bool = False,
) -> list[int]:
    """Run a program in a process for each of ``environments``, and return the exit codes. With ``waits``, the failure
    of one does not kill the others."""
    return _ask(_request(program, arguments, outputs, environments) | {"seconds": seconds, "waits": waits})


def _request(
    program: str, arguments: Sequence[str | Path], outputs: Sequence[Path], environments: Sequence[Mapping[str, str]]
) -> dict[str, object]:
    texts = {"arguments": list(map(str, arguments)), "outputs": list(map(str, outputs))}
    return {"program": program, "environments": list(map(dict, environments)), **texts}


def _ask(request: Mapping[str, object]) -> list[int]:
    """Send a request to the server, and return the exit codes, or the process ids if it starts programs."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(f"{json.dumps(request)}\n")
    server.stdin.flush()
    return json.loads(server.stdout.readline())


@lru_cache(maxsize=1)
def _server() -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", __file__]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def serve() -> str:
    """Fork for every request. The server ends here at the end of its input; a child returns with its program."""
    while line := sys.stdin.readline():
        request = json.loads(line)
        children = [request["collects"]] if "collects" in request else []
        for environment in request.get("environments", ()):
            children.append(os.fork())
            if not children[-1]:
                os.environ.update(environment)
                for descriptor, path in enumerate((os.devnull, *request["outputs"])):
                    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), descriptor)
                sys.argv = ["-c", *request["arguments"]]
                program: str = request["program"]
                return program
        starts = request.get("starts", False)
        found = children if starts else _exit_codes(children, request["seconds"], request.get("waits", False))
        print(json.dumps(found), flush=True)  # noqa: T201
    sys.exit()


def _exit_codes(children: Sequence[int], seconds: float, waits: bool) -> list[int]:
    """Wait for ``children``, and kill those that run when one has failed, unless ``waits``, or after ``seconds``."""
    codes: dict[int, int] = {}
    end: float | None = time.monotonic() + seconds
    running = {os.pidfd_open(child): child for child in children}  # readable once the child has ended
    while running:
        left = None if end is None else max(0.0, end - time.monotonic())
        ended = select.select(list(running), [], [], left)[0]
        for descriptor in ended:
            child = running.pop(descriptor)
            os.close(descriptor)
            codes[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if not ended or (any(codes.values()) and not waits):
            for descriptor in running:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            end = None
    return [codes[child] for child in children]


if __name__ == "__main__":
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401

    gc.freeze()  # a collection in a child would copy all pages of the server
    sys.path[0] = str(ROOT)
    # An exception of the program leaves this module, so Python ends as it does after an exception of any program.
    exec(compile(serve(), "<string>", "exec"), {"__name__": "__main__"})
