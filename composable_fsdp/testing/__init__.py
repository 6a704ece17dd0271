"""Tools for tests of this library and of programs that use it.

- :func:`run_ranks` runs a function on several gloo processes. :class:`RanksError` has the errors of all ranks.
- :class:`FakeWorld` simulates all ranks of an axis in one process. Waiting too early raises :class:`DeadlockError`,
  launching different collectives :class:`MismatchError`.
- :func:`inject_faults` injects faults into a model's operations. :class:`Delay`, :class:`Drop`,
  :class:`Raise` and :class:`Kill` are the effects, and a :class:`Fault` says when one happens.
  :class:`FaultyCommunicator` does the same for one communicator.
- :func:`assert_trace` compares the events of a ``Recorder`` with the expected ones, line by line.
"""

from composable_fsdp.testing._assert_trace import assert_trace
from composable_fsdp.testing.fake import DeadlockError, FakeCommunicator, FakeWork, FakeWorld, MismatchError
from composable_fsdp.testing.faults import Delay, Drop, Effect, Fault, FaultyCommunicator, Kill, Raise, inject_faults
from composable_fsdp.testing.ranks import RanksError, run_ranks

__all__ = [
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
