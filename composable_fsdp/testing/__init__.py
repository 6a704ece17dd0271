"""Tools for tests of programs that use this library.

- :func:`run_ranks` runs a function on several gloo processes. :class:`RanksError` has the errors of all ranks.
- :func:`inject_faults` injects faults into a model's operations. :class:`Delay`, :class:`Drop`,
  :class:`Raise` and :class:`Kill` are the effects, and a :class:`Fault` says when one happens.
  :class:`FaultyCommunicator` does the same for one communicator.
"""

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
