"""The test kit, for this library's tests and for yours.

- :func:`run_ranks` runs a function on several gloo processes, which it keeps for the next call, and raises
  :class:`RanksError` with every rank's traceback or stack. :func:`shutdown` ends the processes before the interpreter's
  end does.
- :class:`FakeWorld` simulates all ranks of an axis in one process. Waiting too early is a :class:`DeadlockError`,
  launching different collectives a :class:`MismatchError`.
- :func:`inject_faults` gives operations of a model faults: :class:`Delay`, :class:`Drop`, :class:`Corrupt`,
  :class:`Raise` and :class:`Kill` say what happens, a :class:`Fault` when. :class:`FaultyCommunicator` does so for one
  communicator, :class:`PartitionableStore` cuts a rank off from the store.
- :func:`assert_trace` compares what a ``Recorder`` heard with what you expect, line by line.
"""

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
from composable_fsdp.testing.partition import PartitionableStore
from composable_fsdp.testing.ranks import RanksError, run_ranks, shutdown

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
    "PartitionableStore",
    "Raise",
    "RanksError",
    "assert_trace",
    "inject_faults",
    "run_ranks",
    "shutdown",
]
