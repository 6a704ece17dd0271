"""Processes that are forked from one that has imported torch: the import takes seconds, a fork milliseconds.

A *template* is a process with one thread that imports what workers need and then does nothing but fork and, when asked,
collect what it forked. So a process number stays that of its process until whoever asked for it says that it is done
with it. Templates end when their caller does, and are told so by the end of their socket.

What is forked from one template has its seed for hashes of text, and so the same order in every set of text. Ranks that
torchrun starts have not: who tests them takes more than one template.
"""

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
from typing import Any, NoReturn, Protocol

__all__ = ["Process", "Template", "serve"]

_MOST_DESCRIPTORS = 8
_LENGTH = struct.Struct("=I")


class Process(Protocol):
    """One that was started for a caller, who alone collects it. It leads a process group."""

    pid: int

    @property
    def ended(self) -> bool:
        """Asks without collecting the process: until then its number, and with it its group, cannot be another's."""
        ...

    def kill(self) -> None:
        """Ends the process and those that it started, unless it was collected."""
        ...

    def wait(self) -> int:
        """Collects the process once it has ended. Its exit code; negative for a signal."""
        ...


class Template:
    """The caller's end. Final.

    Args:
        boot: a program for Python that calls :func:`serve` with the number that is its last argument.
        environment: of the template; what libraries read while they are imported stays as it is there.
        timeout: seconds after which a template that does not answer is given up.
    """

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

    def fork(self, arguments: Mapping[str, Any], descriptors: Sequence[int], environment: Mapping[str, str]) -> Process:
        """A process that runs what :func:`serve` was given, with ``arguments`` and its own copies of ``descriptors``.

        Waits for the template to have imported everything. One that could not is what the process is then.
        """
        request = {"arguments": arguments, "environment": dict(environment)}
        pid = self._ask(request, [*descriptors, 1, 2])
        return _Never(self._process) if pid is None else _Forked(self, pid)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def has_ended(self, pid: int) -> bool:
        """Whether a forked process that was not collected has ended. With the template, all have for their caller."""
        return self._ask({"ended": pid}, []) != 0

    def collect(self, pid: int) -> int:
        """The exit code of a forked process, once it has ended."""
        code = self._ask({"collect": pid}, [])
        return -signal.SIGKILL if code is None else code

    def end(self) -> None:
        """Ends the template. What was forked from it goes on."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _ask(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int | None:
        """The answer; ``None`` where the template is gone."""
        try:
            _send(self._socket, request, descriptors)
            answer: int | None = _receive(self._socket)[0]
        except OSError:  # it has ended, or does not answer
            self.end()
            return None
        except BaseException:  # an interrupt: the answer that comes would be taken for that to the next request
            self.end()
            raise
        return answer


class _Forked:
    def __init__(self, template: Template, pid: int) -> None:
        self.pid = pid
        self._template = template
        self._code: int | None = None

    @property
    def ended(self) -> bool:
        return self._code is not None or self._template.has_ended(self.pid)

    def kill(self) -> None:
        if self._code is None:
            with suppress(ProcessLookupError):  # its template is gone, so others have collected it
                os.killpg(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if self._code is None:
            self._code = self._template.collect(self.pid)
        return self._code


class _Never:
    """What could not be forked, as its template ended before."""

    ended = True

    def __init__(self, template: subprocess.Popen[bytes]) -> None:
        self.pid = template.pid
        self._template = template

    def kill(self) -> None:
        """There is nothing to end."""

    def wait(self) -> int:
        return self._template.wait()


def serve(descriptor: int, run: Callable[..., None]) -> None:
    """The template: forks processes that call ``run`` until the socket ``descriptor`` is closed at the other end.

    Args:
        run: gets the arguments of the request, and as ``descriptors`` those that came with it.
    """
    gc.collect()
    gc.freeze()  # or the first collection of every process would write to all pages, and so copy them
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
                    _become(request, descriptors, run)
                _lead_group(answer)  # before anybody knows its number
                for each in descriptors:
                    os.close(each)
            with suppress(BrokenPipeError, ConnectionResetError):  # the caller is gone, as the next request tells
                _send(requests, answer, [])


def _lead_group(pid: int) -> None:
    """Done by parent and child, since nobody knows which comes first. The child may be gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, pid)


def _become(request: Mapping[str, Any], descriptors: Sequence[int], run: Callable[..., None]) -> NoReturn:
    """The forked process, from its beginning to its end."""
    code = 1
    try:
        _lead_group(os.getpid())
        *own, stdout, stderr = descriptors
        for source, target in ((stdout, 1), (stderr, 2)):
            os.dup2(source, target)
            os.close(source)
        os.environ.clear()
        os.environ.update(request["environment"])
        run(**request["arguments"], descriptors=own)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # nobody above would print it
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
    """What was sent, with its descriptors; ``None`` once the other end is closed."""
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
