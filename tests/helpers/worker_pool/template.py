"""Fork server for processes that need torch: the import takes seconds, a fork milliseconds. A *template* is a process
with one thread that imports what workers need, and then only forks and, on request, collects its children. A process id
therefore stays valid until the caller has collected the process. A template ends when its caller does, because that
closes its socket. All children of a template have its hash seed, and so the same order in every set of ``str``. Ranks
that torchrun starts have different seeds, so tests should use more than one template."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

_MOST_DESCRIPTORS = 8
_LENGTH = struct.Struct("=I")


class Template:
    """The caller's end of a template. Final. ``boot``: a Python program that calls :func:`serve` with the number that
    is its last argument. ``environment``: the environment of the template. What libraries read from it at import stays
    as it is. ``timeout``: seconds after which a template that does not answer is abandoned."""

    def __init__(self, boot: str, environment: Mapping[str, str], timeout: float) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(timeout)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", boot, json.dumps(sys.path), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,  # Ctrl-C is the caller's
            )

    def fork(self, arguments: Mapping[str, Any], pipe: int, environment: Mapping[str, str]) -> Process:
        """Fork a process that runs the function of :func:`serve` with ``arguments`` and a copy of a descriptor. Waits
        until the template has imported everything. If that failed, the returned process is the template, which has
        ended."""
        request = {"arguments": arguments, "environment": dict(environment)}
        pid = self._ask(request, [pipe, 1, 2])
        return Process(self, self._process.pid, self._process.wait()) if pid is None else Process(self, pid)

    @property
    def alive(self) -> bool:
        """True if the template runs."""
        return self._process.poll() is None

    def has_ended(self, pid: int) -> bool:
        """Return whether a child that was not collected has ended. All children of a template that has ended count."""
        return self._ask({"ended": pid}, []) != 0

    def collect(self, pid: int) -> int:
        """Wait for a child to end, and return its exit code."""
        code = self._ask({"collect": pid}, [])
        return -signal.SIGKILL if code is None else code

    def end(self) -> None:
        """End the template. Its children continue."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _ask(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int | None:
        """Send a request and return the answer, or ``None`` if the template has ended."""
        try:
            _send(self._socket, request, descriptors)
            answer: int | None = _receive(self._socket)[0]
        except OSError:  # it has ended, or does not answer
            self.end()
            return None
        except BaseException:  # an interrupt: the pending answer would be read as that to the next request
            self.end()
            raise
        return answer


class Process:
    """A child of ``template``, unless its exit code, ``returncode``, is known already. Final. It leads a process group,
    and has the methods of ``subprocess.Popen`` that ``RankProcess`` calls. Only the caller collects it. Until then its
    id and its process group cannot be reused, even if it has ended."""

    def __init__(self, template: Template, pid: int, returncode: int | None = None) -> None:
        self.pid = pid
        self.returncode = returncode
        self._template = template

    def poll(self) -> int | None:
        """Collect the process if it has ended, and return its exit code, negative for a signal."""
        return self.wait() if self.returncode is None and self._template.has_ended(self.pid) else self.returncode

    def wait(self) -> int:
        """Collect the process once it has ended, and return its exit code, negative for a signal."""
        if self.returncode is None:
            self.returncode = self._template.collect(self.pid)
        return self.returncode


def serve(descriptor: int, run: Callable[..., None]) -> None:
    """Run the template: fork processes that call ``run``, until the other end of the socket ``descriptor`` is closed.
    ``run``: called with the arguments of the request, and as ``pipe`` with the descriptor that came with it."""
    gc.collect()
    gc.freeze()  # otherwise the first collection of every child would write to all pages, and so copy them
    with socket.socket(fileno=descriptor) as requests:
        while True:
            request, descriptors = _receive(requests)
            if request is None:
                return
            if "collect" in request:
                answer = os.waitstatus_to_exitcode(os.waitpid(request["collect"], 0)[1])
            elif "ended" in request:
                found = os.waitid(os.P_PID, request["ended"], os.WEXITED | os.WNOHANG | os.WNOWAIT)
                answer = int(found is not None)
            else:
                answer = os.fork()
                if answer == 0:
                    requests.close()
                    _run_child(request, descriptors, run)
                _lead_group(answer)  # before the caller knows its id
                for each in descriptors:
                    os.close(each)
            with suppress(BrokenPipeError, ConnectionResetError):  # the caller has ended; the next receive sees it
                _send(requests, answer, [])


def _lead_group(pid: int) -> None:
    """Make the child lead a process group. Parent and child both call this, as either may be first."""
    with suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, pid)


def _run_child(request: Mapping[str, Any], descriptors: Sequence[int], run: Callable[..., None]) -> NoReturn:
    """Run the forked process from beginning to end."""
    code = 1
    try:
        _lead_group(os.getpid())
        pipe, stdout, stderr = descriptors
        for source, target in ((stdout, 1), (stderr, 2)):
            os.dup2(source, target)
            os.close(source)
        os.environ.clear()
        os.environ.update(request["environment"])
        run(**request["arguments"], pipe=pipe)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # there is no caller to print it
        traceback.print_exc()
    finally:
        os._exit(code)


def _send(to: socket.socket, what: object, descriptors: Sequence[int]) -> None:
    data = json.dumps(what).encode()
    header = _LENGTH.pack(len(data))
    if descriptors:
        socket.send_fds(to, [header], descriptors)
        to.sendall(data)
    else:
        to.sendall(header + data)


def _receive(source: socket.socket) -> tuple[Any, list[int]]:
    """Return a message with its descriptors, or ``None`` once the other end is closed."""
    header, descriptors, _, _ = socket.recv_fds(source, _LENGTH.size, _MOST_DESCRIPTORS)
    if not header:
        return None, []
    (length,) = _LENGTH.unpack(header)
    data = b""
    while len(data) < length:
        chunk = source.recv(length - len(data))
        if not chunk:
            return None, descriptors
        data += chunk
    return json.loads(data), descriptors
