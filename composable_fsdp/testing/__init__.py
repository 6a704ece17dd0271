"""Tools for tests of this library and of programs that use it.

- :func:`run_ranks` runs a function on several gloo processes, which are kept for the next call, and raises
  :class:`RanksError` with every rank's traceback or stack. :func:`shutdown` ends the processes before the interpreter's
  exit.
- :class:`FakeWorld` simulates all ranks of an axis in one process. Waiting too early raises :class:`DeadlockError`,
  launching different collectives :class:`MismatchError`.
- :func:`inject_faults` injects faults into a model's operations. :class:`Delay`, :class:`Drop`, :class:`Corrupt`,
  :class:`Raise` and :class:`Kill` are the effects, and a :class:`Fault` says when one happens.
  :class:`FaultyCommunicator` does the same for one communicator, :class:`PartitionableStore` disconnects a rank from
  the store.
- :func:`simulated_accelerator` gives ``torch.cpu`` streams, and finds accesses to memory that they do not order.
  Process groups of the backend :data:`BACKEND` communicate over gloo on a stream of their own, and those of
  :data:`ALONE` without other processes.
- :func:`assert_trace` compares the events of a ``Recorder`` with the expected ones, line by line.
"""

from composable_fsdp.testing._assert_trace import assert_trace
from composable_fsdp.testing._stream_group import ALONE, BACKEND
from composable_fsdp.testing.accelerator import (
    Race,
    SimulatedAccelerator,
    SimulatedEvent,
    SimulatedStream,
    simulated_accelerator,
)
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
    "ALONE",
    "BACKEND",
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
    "Race",
    "Raise",
    "RanksError",
    "SimulatedAccelerator",
    "SimulatedEvent",
    "SimulatedStream",
    "assert_trace",
    "inject_faults",
    "run_ranks",
    "shutdown",
    "simulated_accelerator",
]
