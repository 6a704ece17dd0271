"""``run_ranks``: runs a function on real processes, and reports their failures as one readable error."""

from __future__ import annotations

import atexit
import linecache
import pickle
import re
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import TypeVar

from composable_fsdp._consistency.rank_report import format_ranks
from composable_fsdp.errors import ConfigurationError
from composable_fsdp.testing._messages import Job, Raised, Ready, Returned, warning_filters
from composable_fsdp.testing._pool import Died, Outcome, RankPool, Stuck, end_templates

__all__ = ["RanksError", "run_ranks", "shutdown"]

T = TypeVar("T")

_THREAD = re.compile(r"^(?=Current thread |Thread )", re.MULTILINE)
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')


class RanksError(AssertionError):
    """A function given to :func:`run_ranks` failed.

    Attributes:
        failures: descriptions of the failures by rank. Ranks that returned are left out.
    """

    def __init__(self, headline: str, failures: Mapping[int, str]) -> None:
        self.failures = dict(failures)
        ranks_by_text: dict[str, list[int]] = {}
        for rank, text in failures.items():
            ranks_by_text.setdefault(text, []).append(rank)
        parts = [f"--- {format_ranks(ranks)}: {text}" for text, ranks in ranks_by_text.items()]
        super().__init__("\n".join([headline, *parts]))


def run_ranks(
    function: Callable[..., T],
    world_size: int,
    *args: object,
    timeout: float = 60.0,
    environment: Mapping[str, str] = MappingProxyType({}),
    lost: Collection[int] = (),
    **kwargs: object,
) -> list[T]:
    """Run ``function(*args, **kwargs)`` on ``world_size`` processes at once, and return the results in rank order.

    In each process ``torch.distributed`` is initialised with gloo on the loopback interface, torch computes with one
    thread, all seeds are 0, and the caller's warning filters are in effect. Processes are kept for the next call with
    the same world size and environment. They are forked from processes that have imported torch, so only the first call
    pays for the import; libraries that read the environment at import read it then. Before every call, the default
    dtype, device and grad mode are reset, process groups made by earlier functions are destroyed, and failed steps
    forgotten. Module globals are kept.

    Args:
        function: a function at the top level of a module that the workers can import by name. The function, its
            arguments and results are pickled. Every worker imports its module once.
        world_size: number of processes, at least 1.
        environment: variables to set in the processes, in addition to the caller's environment.
        timeout: seconds after which the function must have returned on all ranks, without the start of the processes.
        lost: ranks that the function kills, stops or lets raise, to test the others. They have no result. Once the
            others have returned, all processes are killed.

    Raises:
        RanksError: on a rank not in ``lost`` the function raised, died, or did not return in time. All processes of
            this world size are then killed, because a failed collective leaves ranks out of step. The next call starts
            new ones.
        ConfigurationError: the function or its arguments cannot be pickled for other processes.
    """
    __tracebackhide__ = True
    if world_size < 1:
        raise ConfigurationError(f"run_ranks needs at least one rank, not {world_size}.")
    job = _pickled(Job(function, args, kwargs, warning_filters()))
    with _lock:
        outcomes = _on_pool((world_size, frozenset(environment.items())), job, timeout, lost)
    _raise_failures(function, outcomes, lost)
    return [pickle.loads(o.result) for rank, o in enumerate(outcomes) if isinstance(o, Returned) and rank not in lost]


def shutdown() -> None:
    """End all worker processes, as the interpreter's exit does. The next :func:`run_ranks` starts new ones."""
    with _lock:
        while _pools:
            _pools.popitem()[1].kill()
        end_templates()


_Key = tuple[int, frozenset[tuple[str, str]]]
"""World size and environment."""

_pools: dict[_Key, RankPool] = {}
_lock = threading.RLock()


@cache
def _shut_down_at_exit() -> None:
    atexit.register(shutdown)


def _on_pool(key: _Key, job: bytes, timeout: float, lost: Collection[int]) -> list[Outcome]:
    """Run the job, and keep the pool only if every rank can run another."""
    _shut_down_at_exit()
    pool = _take(key)
    reusable = False
    try:
        outcomes = pool.wait_until_ready()
        if all(isinstance(outcome, Ready) for outcome in outcomes):
            outcomes = pool.run(job, timeout, lost)
            reusable = not lost and all(isinstance(outcome, Returned) and outcome.group_alive for outcome in outcomes)
    finally:
        if reusable:
            _pools[key] = pool
        else:
            pool.kill()
    return outcomes


def _take(key: _Key) -> RankPool:
    pool = _pools.pop(key, None)
    if pool is not None and pool.alive:
        return pool
    if pool is not None:  # a worker was killed between calls
        pool.kill()
    world_size, environment = key
    return RankPool(world_size, dict(environment))


def _pickled(job: Job) -> bytes:
    name = _name(job.function)
    if job.function.__module__ == "__main__":
        raise ConfigurationError(
            f"run_ranks: other processes cannot import {name} from the script that was started. "
            "Move it to a module and import it from there."
        )
    try:
        return pickle.dumps(job)
    except Exception as error:
        raise ConfigurationError(
            f"run_ranks: {name} and its arguments cannot be sent to other processes: {error}. The function must stand "
            "at the top of a module, and the arguments must be picklable."
        ) from error


def _name(function: Callable[..., object]) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _raise_failures(function: Callable[..., object], outcomes: Sequence[Outcome], lost: Collection[int] = ()) -> None:
    __tracebackhide__ = True
    failures = {r: _describe(o) for r, o in enumerate(outcomes) if not isinstance(o, (Ready, Returned))}
    was_run = not any(isinstance(outcome, Ready) for outcome in outcomes)
    if was_run and failures.keys() <= set(lost):
        return
    culprits = [r for r, o in enumerate(outcomes) if isinstance(o, (Raised, Died))]
    what = "failed" if culprits else "did not return in time"
    where = f"{format_ranks(culprits or failures)} of {len(outcomes)}"
    raise RanksError(f"{_name(function)} {what} on {where}", failures)


def _describe(outcome: Outcome) -> str:
    match outcome:
        case Raised(error, traceback):
            return f"raised {error}\n{traceback.rstrip()}"
        case Died(exit_code, stacks) if exit_code < 0:
            return _lines(f"died of {_signal_name(-exit_code)}", stacks)
        case Died(exit_code, stacks):
            return _lines(f"ended with exit code {exit_code}", stacks)
        case Stuck(seconds, stacks):
            where = function_stack(stacks) or stacks or "(its stack is not available)"
            return _lines(f"killed after {seconds:.1f} s, when it was at", where)
        case _:
            return "returned"


def _lines(headline: str, rest: str) -> str:
    return f"{headline}\n{rest.rstrip()}" if rest.strip() else headline


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def function_stack(dump: str) -> str:
    """Extract the stack of the function that ran from faulthandler's text, formatted as in a traceback.

    Empty if no thread has the frame of the worker's ``_run``, which is also missing if a deep stack was truncated.
    """
    for thread in _THREAD.split(dump):
        frames = [match for line in thread.splitlines() if (match := _FRAME.fullmatch(line))]
        for depth, frame in enumerate(frames):
            if frame["name"] == "_run" and frame["file"].endswith("testing/_worker.py"):
                return "\n".join(line for inner in reversed(frames[:depth]) for line in _traceback_lines(inner))
    return ""


def _traceback_lines(frame: re.Match[str]) -> Iterator[str]:
    yield f'  File "{frame["file"]}", line {frame["line"]}, in {frame["name"]}'
    if source := linecache.getline(frame["file"], int(frame["line"])).strip():
        yield f"    {source}"
