"""What every client tells the runner: its losses, and whose ``fully_shard`` made its modules."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["STEPS", "tell"]

STEPS = 10


def tell(
    models: Sequence[nn.Module], losses: Sequence[float], shown: Mapping[str, Any] | None = None, **same: Any
) -> None:
    """Ends a client: writes what came out on this rank, and leaves the process group together with the others.

    Args:
        models: those that were trained; modules that ``fully_shard`` was applied to are counted, by library.
        losses: of every step, on this rank.
        shown: what else is worth a place in the table, of rank 0.
        same: what else must be the same on both libraries, as JSON holds it.
    """
    sharded = [module for model in models for module in model.modules() if isinstance(module, FSDPModule)]
    rank = dist.get_rank()
    counts = Counter(map(library_of, sharded))
    outcome = {"losses": list(losses), "sharded": counts, "same": same, "shown": shown or {}}
    Path(os.environ["CLIENT_OUT"], f"rank-{rank}.json").write_text(json.dumps(outcome))
    dist.barrier()  # or gloo's threads may still hold tensors when Python ends, and abort it
    dist.destroy_process_group()


def library_of(module: nn.Module) -> str:
    packages = {base.__module__.partition(".")[0] for base in type(module).__mro__}
    return "ours" if "composable_fsdp" in packages else "fsdp2"
