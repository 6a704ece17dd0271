"""The test kit, for this library's tests and for yours.

- :func:`run_ranks` runs a function on several gloo processes, which it keeps for the next call, and raises
  :class:`RanksError` with every rank's traceback or stack. :func:`shutdown` ends the processes before the interpreter's
  end does.
- :class:`FakeWorld` simulates all ranks of an axis in one process. Waiting too early is a :class:`DeadlockError`,
  launching different collectives a :class:`MismatchError`.
- :func:`assert_trace` compares what a ``Recorder`` heard with what you expect, line by line.
"""

from composable_fsdp.testing.fake import DeadlockError, FakeCommunicator, FakeWork, FakeWorld, MismatchError
from composable_fsdp.testing.ranks import RanksError, run_ranks, shutdown
from composable_fsdp.testing.trace import assert_trace

__all__ = [
    "DeadlockError",
    "FakeCommunicator",
    "FakeWork",
    "FakeWorld",
    "MismatchError",
    "RanksError",
    "assert_trace",
    "run_ranks",
    "shutdown",
]
