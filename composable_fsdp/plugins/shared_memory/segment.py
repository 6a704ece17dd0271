"""Memory that other processes can map: anonymous files, which are freed when no process maps them."""

from __future__ import annotations

import errno
import fcntl
import os
import weakref

import torch

SLOT_BYTES = 2 << 20
"""The bytes staged per rank at a time. A rank fills one slot while its peers read another."""

NUM_SLOTS = 96
"""The slots of each rank: so many steps can be staged before the slowest rank has done the first, as when it waits in a
collective of the user's. Low ones are reused first, so that few are ever written: new pages cost page faults.
"""


def check_sealed(descriptor: int) -> None:
    """Raise ``OSError`` unless the size of the file ``descriptor``, which a peer sent, can never change.

    A peer that shrinks a file, or dies while it does, would end this process by SIGBUS at the next access.
    """
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _seals() != _seals():
        raise OSError(errno.EPERM, "a peer sent memory that is not sealed against shrinking")


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def map_segment(descriptor: int) -> torch.Tensor:
    """Map the open file ``descriptor``, which may be closed then, as bytes for the life of the tensor and its views.

    Raises:
        OSError: the file cannot be mapped here.
    """
    path, nbytes = f"/proc/self/fd/{descriptor}", os.fstat(descriptor).st_size
    try:
        with torch.inference_mode(False):  # not an inference tensor
            return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        raise OSError(f"{nbytes} bytes of shared memory cannot be mapped: {error}") from error


class Segment:
    """``nbytes`` of zeroed shared memory created by this process. Pages take memory once they are written."""

    def __init__(self, nbytes: int) -> None:
        self.descriptor = os.memfd_create("composable_fsdp", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, nbytes)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _seals())
        self.memory = map_segment(self.descriptor)
