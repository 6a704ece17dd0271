"""A ``python`` for launchers whose processes are forked from one that has imported torch. The import of torch takes
most of the time of a short job under torchrun, in its agent and in each rank. The executable of :func:`forked_python`
asks a server for a fork, which runs the program with the arguments, variables, directory and descriptors of the caller.
It passes on signals, and ends as the fork does. If it is killed, so is the fork."""

from __future__ import annotations

import gc
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LENGTH = struct.Struct("=I")
CLIENT = """#!{python} -SEs
import json, os, signal, socket, struct, sys
server = socket.socket(socket.AF_UNIX)
server.connect({path!r})
what = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(server, [struct.pack("=I", len(what))], [0, 1, 2])
server.sendall(what)
pid = int(server.recv(16, socket.MSG_WAITALL))
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = int(server.recv(16, socket.MSG_WAITALL))
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@contextmanager
def forked_python(folder: Path, enter: Sequence[str] = ()) -> Iterator[dict[str, str]]:
    """Yield variables with which shells and torchrun find the executable ``python``, which is made in ``folder``.
    ``enter``: words before a command that let it run on the host of the job."""
    path, executable = folder / "socket", folder / "python"
    executable.write_text(CLIENT.format(python=sys.executable, path=str(path)))
    executable.chmod(0o755)
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [*enter, sys.executable, "-m", "tests.helpers.forked_python", str(path)]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment, start_new_session=True
    )
    assert server.stdin is not None
    assert server.stdout is not None
    with server:
        try:
            assert server.stdout.read(1), "the server has ended"
            yield {"PYTHON_EXEC": str(executable), "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
        finally:
            server.stdin.close()  # ends the server, which ends its children


def serve(path: str) -> list[str]:
    """Fork for each caller until stdin is closed, then exit. A child returns the arguments of its ``python``."""
    gc.freeze()  # a collection in a child would copy all pages of the server
    children: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(path)
        listener.listen()
        selector.register(listener, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        os.write(1, b"+")
        while True:
            for key, _ in selector.select(0.02):
                if key.fileobj == 0:
                    for pid in children:
                        os.kill(pid, signal.SIGKILL)
                    sys.exit()
                if key.data is not None:  # the caller was killed
                    os.kill(key.data, signal.SIGKILL)
                    selector.unregister(key.fileobj)
                    continue
                caller, _ = listener.accept()
                header, descriptors, _, _ = socket.recv_fds(caller, LENGTH.size, 3)
                text = caller.recv(LENGTH.unpack(header)[0], socket.MSG_WAITALL)
                pid = os.fork()
                if not pid:
                    for other in (caller, *children.values()):
                        other.close()
                    return become(json.loads(text), descriptors)
                for each in descriptors:
                    os.close(each)
                caller.sendall(f"{pid:16}".encode())
                children[pid] = caller
                selector.register(caller, selectors.EVENT_READ, pid)
            for pid, caller in list(children.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del children[pid]
                    with suppress(KeyError):
                        selector.unregister(caller)
                    with suppress(OSError):
                        caller.sendall(f"{os.waitstatus_to_exitcode(status):16}".encode())
                    caller.close()


def become(request: Any, descriptors: Sequence[int]) -> list[str]:
    """Take the arguments, variables, directory and descriptors of the caller."""
    arguments, environment, directory = request
    os.setsid()
    for target, source in enumerate(descriptors):
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    return [word for word in arguments if word != "-u"]


if __name__ == "__main__":
    import torch.distributed.run  # noqa: F401

    import composable_fsdp.checkpoint  # noqa: F401

    program, *rest = serve(sys.argv[1])
    sys.path[0] = os.getcwd() if program == "-m" else str(Path(program).parent.resolve())
    if program == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [program, *rest]
        runpy.run_path(program, run_name="__main__")
