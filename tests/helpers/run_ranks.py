"""``run_ranks``: runs a function on several gloo processes, and keeps them for the next call of the world size and
environment, which makes the suite fast.
They are forked from processes that have imported torch, so only the first one pays for the import; other libraries read
the environment at import, so other variables of theirs need other such processes. Before every call, the default dtype,
device and grad mode are reset, process groups made by earlier functions are destroyed, and failed steps forgotten.
Module globals are kept."""

from __future__ import annotations

import atexit
import functools
import importlib
import inspect
import itertools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from math import prod
from multiprocessing import Pipe
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

import pytest
import torch.distributed as dist

from tests.helpers.rank_process import START_TIMEOUT, VARIABLES, Outcome, RankProcess, ask, pickled_job, results_of
from tests.helpers.transports import TRANSPORTS
from tests.helpers.worker_pool.reset import reset
from tests.helpers.worker_pool.template import Template

T = TypeVar("T")

TEMPLATES = 2
"""Templates per environment. Adjacent ranks then differ in per-process randomness, such as hashes of ``str``."""

READ_LATE = "COMPOSABLE_FSDP_"
"""The begin of the variables that this library reads, none of them at import: they need no template of their own."""

BOOT = (
    "import json, sys; requests = int(sys.argv.pop()); sys.path[:] = json.loads(sys.argv.pop()); "
    "from tests.helpers.rank_process import main; import tests.helpers.worker_pool.reset; "
    "import torch._inductor, composable_fsdp.checkpoint; "
    "from tests.helpers.worker_pool.template import serve; serve(requests, main)"
)
"""What templates run. ``use_deterministic_algorithms``, which :func:`reset` calls, imports ``torch._inductor``: without
that, this takes half a second in each process; checkpoints take an eighth."""


def run_ranks(
    function: Callable[..., T],
    world_size: int,
    *args: object,
    timeout: float = 60.0,
    environment: Mapping[str, str] = MappingProxyType({}),
    lost: Collection[int] = (),
    **kwargs: object,
) -> list[T]:
    """Run ``function(*args, **kwargs)`` on ``world_size`` processes at once, and return the results in rank order. In
    each, gloo is initialized on the loopback interface, torch computes with one thread, all seeds are 0, and the
    caller's warning filters are in effect. ``function``: stands at the top of a module; it, its arguments and results
    are pickled. ``timeout``: seconds, without the start. ``environment``: variables to add. ``lost``: ranks that the
    function kills, stops or lets raise: they have no result, and no process is kept. Raises ``RanksError``: on another
    rank the function raised, died, or did not return in time."""
    __tracebackhide__ = True
    job = pickled_job(function, args, kwargs)
    key = world_size, frozenset(environment.items())
    _shut_down_at_exit()
    with _lock:
        pool = _pools.pop(key, None)
        outcomes: list[Outcome] = []
        try:
            if pool is None or not _all_returned(pool.reset()):
                if pool is not None:  # a function has destroyed the default group, or a process was killed
                    pool.kill()
                pool = RankPool(world_size, environment)
                results_of(function, pool.reset())
            outcomes = ask(pool.ranks, job, timeout, lost)
        finally:
            if pool is not None and outcomes and _all_returned(outcomes) and not lost:
                _pools[key] = pool
                pool.pause()
                while len(_pools) > MOST_POOLS:
                    _pools.pop(next(iter(_pools))).kill()
            elif pool is not None:
                pool.kill()
    return results_of(function, outcomes, lost)


def on_ranks(
    *sizes: int | str,
    environment: Mapping[str, str] | str = MappingProxyType({}),
    transports: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    timeout: float = 60.0,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the body of a test on each rank, for each number of ranks and each of ``transports``, which have names. It is
    the innermost decorator. Fixtures and parameters are values that can be pickled, made once for all ranks. A name in
    place of ``sizes`` or ``environment`` is that of a parameter of the test, which the body need not take: a number of
    ranks or the shape of their mesh, and an environment or the name of a transport."""
    size = next((name for name in sizes if isinstance(name, str)), "world_size")
    variables = environment if isinstance(environment, str) else "transport"

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(body).parameters
        given = [name for name, is_given in ((size, size in sizes), (variables, variables == environment)) if is_given]

        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            __tracebackhide__ = True
            ranks, chosen = arguments.get(size, sizes[0]), arguments.get(variables, environment)
            for name in {size, variables} - parameters.keys():
                arguments.pop(name, None)
            ranks = prod(ranks) if isinstance(ranks, tuple) else ranks
            chosen = TRANSPORTS[chosen] if isinstance(chosen, str) else chosen
            run_ranks(_Body(test), ranks, timeout=timeout, environment=chosen, **arguments)

        choices: dict[str, tuple[Sequence[object], Sequence[str] | None]] = {}
        if len(sizes) > 1:
            choices[size] = (sizes, None)
        if transports:
            choices[variables] = (list(transports.values()), list(transports))
        more = [name for name in (*given, *choices) if name not in parameters]
        signature = [each.replace(kind=_BY_NAME) for each in parameters.values()]
        signature += [inspect.Parameter(name, _BY_NAME) for name in more]
        test.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
        for name, (values, ids) in choices.items():
            test = pytest.mark.parametrize(name, values, ids=ids)(test)
        return test

    return decorate


_BY_NAME = inspect.Parameter.KEYWORD_ONLY


class _Body:
    """The body of a test with :func:`on_ranks`, which ranks find by the name of the test."""

    def __init__(self, test: Callable[..., None]) -> None:
        self.__module__, self.__qualname__ = test.__module__, test.__qualname__

    def __call__(self, **arguments: Any) -> None:
        test: Any = getattr(importlib.import_module(self.__module__), self.__qualname__)
        test.__wrapped__(**arguments)


def kill_ranks() -> None:
    """End the ranks, but not the processes from which they are forked. The next :func:`run_ranks` forks new ranks."""
    with _lock:
        while _pools:
            _pools.popitem()[1].kill()


def shutdown() -> None:
    """End all processes, as the interpreter's exit does. The next :func:`run_ranks` starts new ones."""
    with _lock:
        kill_ranks()
        while _templates:
            _templates.popitem()[1].end()


def _all_returned(outcomes: Collection[Outcome]) -> bool:
    return not any(outcome.failure for outcome in outcomes)


class RankPool:
    """``size`` processes that have ``environment`` in addition to their parent's. Final. The caller may ``pause`` it
    until the next call, which begins with ``reset``. If a process fails, the caller must ``kill`` the pool: a failed
    collective leaves ranks out of step."""

    def __init__(self, size: int, environment: Mapping[str, str]) -> None:
        self.ranks: list[RankProcess] = []
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory()
        self._calls = itertools.count()
        variables = {**os.environ, **VARIABLES, **environment}
        templates = [_template(number, environment, variables) for number in range(min(size, TEMPLATES))]
        try:
            for rank in range(size):
                stacks = Path(self._folder.name, str(rank))
                arguments = {"rank": rank, "world_size": size, "port": self._store.port, "stacks": str(stacks)}
                connection, theirs = Pipe()
                with theirs:
                    process = templates[rank % TEMPLATES].fork(arguments, theirs.fileno(), variables)
                self.ranks.append(RankProcess(cast("subprocess.Popen[bytes]", process), connection, stacks))
        except BaseException:
            self.kill()
            raise

    def reset(self) -> list[Outcome]:
        """Make all processes alike, with the caller's modules and directory. The first call waits for their start."""
        self._signal(signal.SIGCONT)
        args = next(self._calls), sys.path, os.getcwd()
        return ask(self.ranks, pickle.dumps((reset, args, {}, [])), START_TIMEOUT)

    def pause(self) -> None:
        """Stop all processes. Threads of gloo, watchdogs and stores wake all the time otherwise: 3 ms per second each.
        If the caller is killed, their template ends, and the system ends them: it hangs up and continues stopped
        processes whose parent ends."""
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for rank in self.ranks:
            if rank.process.returncode is None:  # not collected, so the id is its own even if it has ended
                os.kill(rank.process.pid, number)

    def kill(self) -> None:
        """Kill all processes and their children, and wait until they have ended."""
        for rank in self.ranks:
            rank.kill()
        self._folder.cleanup()


MOST_POOLS = 4
"""The number of pools to keep: every process has about 100 MB of its own."""

_pools: dict[tuple[int, frozenset[tuple[str, str]]], RankPool] = {}
"""Pools by world size and environment, that of the last call last."""

_templates: dict[tuple[int, frozenset[tuple[str, str]]], Template] = {}
"""Templates by number, and by the variables of others that their processes have in addition to this process's."""

_lock = threading.RLock()


@cache
def _shut_down_at_exit() -> None:
    atexit.register(shutdown)


def _template(number: int, extra: Mapping[str, str], environment: Mapping[str, str]) -> Template:
    key = (number, frozenset((name, value) for name, value in extra.items() if not name.startswith(READ_LATE)))
    if key in _templates and not _templates[key].alive:
        _templates.pop(key).end()
    if key not in _templates:
        early = {name: value for name, value in environment.items() if not name.startswith(READ_LATE)}
        _templates[key] = Template(BOOT, early, START_TIMEOUT)
    return _templates[key]
