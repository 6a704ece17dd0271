"""A simulated accelerator: :func:`simulated_accelerator` gives ``torch.cpu`` streams, on real tensors of the CPU. It
finds accesses to memory that its streams do not order, and executes recorded operations late, in other orders that its
events allow. Importing this package registers two backends: process groups of :data:`BACKEND` communicate over gloo on
a stream of their own, and those of :data:`ALONE` without other processes. ``docs/accelerators.md`` describes both.
Groups of ``tests.simulation.nccl`` have the classes and names of NCCL's and keep its contract: see ``docs/nccl.md``."""

from tests.simulation.accelerator import (
    Race,
    SimulatedAccelerator,
    SimulatedEvent,
    SimulatedStream,
    simulated_accelerator,
)
from tests.simulation.stream_group import ALONE, BACKEND

__all__ = [
    "ALONE",
    "BACKEND",
    "Race",
    "SimulatedAccelerator",
    "SimulatedEvent",
    "SimulatedStream",
    "simulated_accelerator",
]
