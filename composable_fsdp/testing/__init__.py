"""Tools for tests of programs that use this library.

- :func:`run_ranks` runs a function on several gloo processes. :class:`RanksError` has the errors of all ranks.
- :func:`inject_faults` injects faults into a model's operations. :class:`Delay`, :class:`Drop`,
  :class:`Raise` and :class:`Kill` are the effects, and a :class:`Fault` says when one happens.
  :class:`FaultyCommunicator` does the same for one communicator.
"""

from typing import NoReturn

from composable_fsdp.testing.faults import Delay, Drop, Effect, Fault, FaultyCommunicator, Kill, Raise, inject_faults
from composable_fsdp.testing.ranks import RanksError, run_ranks

__all__ = [
    "Delay",
    "Drop",
    "Effect",
    "Fault",
    "FaultyCommunicator",
    "Kill",
    "Raise",
    "RanksError",
    "inject_faults",
    "run_ranks",
]

_OF_THE_TESTS = {
    "assert_trace": "assert_trace",
    **dict.fromkeys(("DeadlockError", "FakeCommunicator", "FakeWork", "FakeWorld", "MismatchError"), "fake_world"),
}


def __getattr__(name: str) -> NoReturn:
    if name in _OF_THE_TESTS:  # an AttributeError would lose its text in ``from ... import``
        raise ImportError(
            f"testing.{name} is a part of the repository's tests: tests/helpers/{_OF_THE_TESTS[name]}.py in a clone."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
