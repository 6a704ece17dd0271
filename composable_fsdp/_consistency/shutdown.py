"""``shutdown``: the end of a program on all ranks together."""

from __future__ import annotations

import torch.distributed as dist

from composable_fsdp._consistency.rank_report import format_ranks
from composable_fsdp._consistency.rendezvous import StoreRendezvous, world_store
from composable_fsdp._consistency.watchdog import MissingRanks, job_watchdog
from composable_fsdp.errors import PeerError

_CALL = "composable_fsdp.shutdown()"


def shutdown(timeout: float = 1800.0) -> None:
    """Wait until all ranks have come to the end of the program, and destroy the default process group.

    Call it last, on all ranks, instead of ``dist.barrier()`` and ``dist.destroy_process_group()``. A barrier waits for
    the timeout of its process group if a rank cannot come to it, for instance because it has a batch more and waits for
    this one. Here ranks meet in the store of the job, and find that out within seconds.

    Args:
        timeout: the most seconds to wait for ranks that are late.

    Raises:
        PeerError: a rank cannot come, or did not within ``timeout``. The text says what it does. Ranks that wait for
            this one raise it, too.
    """
    watchdog = job_watchdog()
    if watchdog is not None:
        rank, size = dist.get_rank(), dist.get_world_size()
        rendezvous = StoreRendezvous("shutdown", rank, range(size))
        missing = MissingRanks(watchdog, _CALL, timeout, range(size))
        try:
            verdict = rendezvous.meet(world_store(), "", timeout, missing.explain)
        except dist.DistError as error:
            raise PeerError(f"{_CALL}: the store of the job cannot be reached any more ({error}).") from error
        if verdict.missing:
            late = f"{format_ranks(verdict.missing)} did not make this call within {timeout:g} s. "
            advice = "All ranks must make it, after as many batches as the others."
            unmet = PeerError(f"{_CALL}: {verdict.reason or late}{advice}", verdict.missing)
            watchdog.give_up(unmet)  # ranks that wait for this one need not wait longer
            raise unmet
        if dist.get_backend() == "gloo":
            dist.barrier()  # or its threads may still hold tensors when Python ends, and abort it
    dist.destroy_process_group()
