"""Reports the results of a client to the runner: losses, and the library that sharded its modules."""

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
    """End a client: write the results of this rank, and leave the process group together with the other ranks.

    Args:
        models: the trained models. Their sharded modules are counted by library.
        losses: the losses of all steps on this rank.
        shown: other values of rank 0 for the table.
        same: other values that must be the same on both libraries, as JSON.
    """
    sharded = [module for model in models for module in model.modules() if isinstance(module, FSDPModule)]
    rank = dist.get_rank()
    counts = Counter(map(library_of, sharded))
    outcome = {"losses": list(losses), "sharded": counts, "same": same, "shown": shown or {}}
    Path(os.environ["CLIENT_OUT"], f"rank-{rank}.json").write_text(json.dumps(outcome))
    dist.barrier()  # otherwise gloo's threads may still hold tensors when Python ends, and abort it
    dist.destroy_process_group()


def library_of(module: nn.Module) -> str:
    packages = {base.__module__.partition(".")[0] for base in type(module).__mro__}
    return "ours" if "composable_fsdp" in packages else "fsdp2"
