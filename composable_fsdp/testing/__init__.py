"""Tools for tests of this library and of programs that use it.

- :func:`run_ranks` runs a function on several gloo processes. :class:`RanksError` has the errors of all ranks.
- :class:`FakeWorld` simulates all ranks of an axis in one process. Waiting too early raises :class:`DeadlockError`,
  launching different collectives :class:`MismatchError`.
- :func:`inject_faults` injects faults into a model's operations. :class:`Delay`, :class:`Drop`, :class:`Corrupt`,
  :class:`Raise` and :class:`Kill` are the effects, and a :class:`Fault` says when one happens.
  :class:`FaultyCommunicator` does the same for one communicator.
- :func:`assert_trace` compares the events of a ``Recorder`` with the expected ones, line by line.
"""

from typing import TYPE_CHECKING, Any

from composable_fsdp.testing._assert_trace import assert_trace
from composable_fsdp.testing.fake import DeadlockError, FakeCommunicator, FakeWork, FakeWorld, MismatchError
from composable_fsdp.testing.faults import (
    Corrupt,
    Delay,
    Drop,
    Effect,
    Fault,
    FaultyCommunicator,
    Kill,
    Raise,
    inject_faults,
)
from composable_fsdp.testing.ranks import RanksError, run_ranks

__all__ = [
    "Corrupt",
    "DeadlockError",
    "Delay",
    "Drop",
    "Effect",
    "FakeCommunicator",
    "FakeWork",
    "FakeWorld",
    "Fault",
    "FaultyCommunicator",
    "Kill",
    "MismatchError",
    "Raise",
    "RanksError",
    "assert_trace",
    "inject_faults",
    "run_ranks",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in ("ALONE", "BACKEND", "Race", "simulated_accelerator") or name.startswith("Simulated"):
            # No AttributeError: `from composable_fsdp.testing import ...` would leave out its text.
            raise ImportError(f"{name} is not in {__name__}. In a clone of the repository, tests.simulation has it.")
        if name == "shutdown":
            raise ImportError(f"{__name__} has no shutdown any more: run_ranks keeps no processes. Leave the call out.")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
