"""The rules of c10d and NCCL that the stand-in keeps, and the exception of a program that breaks one.
``tests.simulation.nccl`` has the process groups, and ``tests.simulation.accelerator`` the streams, events and memory.
``docs/nccl.md`` has the table: a test compares it with :data:`RULES`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of c10d or NCCL. ``text``: the rule. ``source``: the documentation or the source that says so.
    ``only_gpu``: what the stand-in cannot show of it."""

    text: str
    source: str
    only_gpu: str = ""


_NOTES = "notes on CUDA graphs, CUDA programming guide"
RULES = {
    "current stream": Rule(
        "A collective with async_op=False runs on the current stream of its caller and returns no work: only that "
        "stream is ordered after it.",
        "ProcessGroupNCCL.cpp of torch 2.12, collective()",
        "the priority of the kernels, and the gaps between them",
    ),
    "own stream": Rule(
        "A collective with async_op=True runs on a stream of its process group, which first waits for the current "
        "stream, and for no other.",
        "ProcessGroupNCCL.cpp of torch 2.12, collective()",
        "the priority of the kernels",
    ),
    "wait": Rule(
        "wait() orders the current stream after the collective: no other stream, and not the host.",
        "nccl2/WorkNCCL.cpp, synchronizeInternal()",
    ),
    "held": Rule(
        "A work holds the tensors of its collective until wait(); a collective with async_op=False holds none.",
        "ProcessGroupNCCL.hpp of torch 2.13, TensorShelf",
    ),
    "order": Rule(
        "All ranks launch the operations of a communicator in one order, and they run in that order, whatever the "
        "streams.",
        "pytorch/pytorch#137390",
        "deadlocks between two communicators whose kernels do not fit on the device together",
    ),
    "dtype": Rule(
        "A collective takes the dtypes that NCCL has: not int16, uint16, uint32, uint64 or float8_e8m0fnu.",
        "nccl2/ProcessGroupNCCLUtils.cpp, ncclDataType",
    ),
    "reduce op": Rule(
        "AVG reduces floating-point tensors only, and there are no BAND, BOR and BXOR.",
        "ProcessGroupNCCL.cpp, getNcclReduceOp()",
    ),
    "coalescing": Rule(
        "Collectives that are coalesced have one kind, dtype and operation.",
        "distributed_c10d.py of torch 2.13, _coalescing_manager",
        "the time of a grouped launch beside several",
    ),
    "open group": Rule(
        "No exception leaves _coalescing_manager: it has no `finally`, so later collectives of the group never start.",
        "distributed_c10d.py of torch 2.13, _coalescing_manager",
    ),
    "device of the thread": Rule(
        "A thread that uses an event, a stream or a work has set its device: new threads are on device 0.",
        "meta-pytorch/torchcomms#777",
        "the size of a context on device 0 (`nvidia-smi`)",
    ),
    "device of a destructor": Rule(
        "A thread that destroys an event or a work has set its device.",
        "pytorch/pytorch#135273",
        "the size of a context on device 0 (`nvidia-smi`)",
    ),
    "capture: host": Rule(
        "While a stream is captured, no thread queries or waits for events, streams, works or values of the device.",
        f"{_NOTES}; pytorch/torchtitan#4143",
    ),
    "capture: isolation": Rule(
        "A captured stream waits only for events that were recorded in the same capture, and nothing waits for these "
        "afterwards.",
        "cudaErrorStreamCaptureIsolation, cudaErrorCapturedEvent; pytorch/torchtitan#4143",
    ),
    "capture: fork": Rule(
        "While a stream is captured, other streams work only after they have waited for a captured one.",
        _NOTES,
        "raw allocations of a stream outside of the capture",
    ),
    "capture: join": Rule(
        "A capture ends after its stream has waited for the end of all streams that forked from it.",
        "cudaErrorStreamCaptureUnjoined",
    ),
    "capture: connection": Rule(
        "The first operation of a communicator, which connects it, is not captured.",
        "NCCL user guide, using NCCL with CUDA graphs",
    ),
    "destroyed group": Rule(
        "After destroy_process_group() or abort(), a group starts no operation.",
        "ProcessGroupNCCL.cpp, checkForNCCLErrors",
    ),
    "work of a destroyed group": Rule(
        "After its group is destroyed, nobody waits for a work of nccl2 or asks it: it reads freed memory.",
        "nccl2/WorkNCCL.cpp, comm_",
    ),
    "new group": Rule(
        "Where the default group is bound to a device, and under torchcomms, all ranks of the job call new_group() "
        "together.",
        "distributed_c10d.py of torch 2.13, _new_process_group_helper and _new_group_via_split_group; "
        "pytorch/pytorch#129965",
        "that `ncclCommSplit` hangs, and for how long",
    ),
    "new group of others": Rule(
        "Where the default group is bound to a device, a rank outside of the new group cannot call new_group() under "
        "nccl2, whose class has no perform_nocolor_split(): DeviceMesh and split_group() make such groups.",
        "sgl-project/sglang, multimodal_gen/runtime/distributed/parallel_groups.py",
        "whether a later torch mends it",
    ),
    "local synchronization": Rule(
        "Under torchcomms, new_group() takes no use_local_synchronization=True.",
        "distributed_c10d.py of torch 2.13, _new_group_via_split_group",
    ),
    "timeout": Rule(
        "An operation that lasts for the timeout of its group ends the process, by a thread of the backend.",
        "ProcessGroupNCCL.cpp, TORCH_NCCL_ASYNC_ERROR_HANDLING=3",
        "the end of the process itself",
    ),
    "connection": Rule(
        "The first operation of a communicator connects it: it is slow, and all of its ranks take part.",
        "ProcessGroupNCCL.cpp, lazy initialization",
        "the seconds that it takes",
    ),
}
"""The rules, by id."""


class ContractViolation(AssertionError):
    """A program broke a rule of c10d or NCCL. ``rule`` is its id."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"[{rule}] {RULES[rule].text}\n{detail}\n(source: {RULES[rule].source})")
        self.rule = rule


_reports: list[list[ContractViolation]] = []
"""The violations in the open contexts of :func:`reported`, innermost last."""


def note_violation(rule: str, detail: str) -> ContractViolation:
    """Have the innermost :func:`reported` raise a violation at its end, also where an exception would get lost."""
    violation = ContractViolation(rule, detail)
    if _reports:
        _reports[-1].append(violation)
    return violation


def break_rule(rule: str, detail: str) -> None:
    """Raise a violation here, and at the end of :func:`reported` if the program caught it."""
    raise note_violation(rule, detail)


@contextmanager
def reported() -> Iterator[list[ContractViolation]]:
    """Raise the first violation at the end of this context, unless another exception ends it."""
    found: list[ContractViolation] = []
    _reports.append(found)
    try:
        yield found
    finally:
        _reports.remove(found)
    if found:
        raise found[0]
