"""Runs one of two training ranks. The second rank pauses after three steps.

python -m tests.helpers.paused_rank STORE
"""

from __future__ import annotations

import os
import sys
import time

import torch.distributed as dist

from tests.helpers.two_layers import build, sgd, step


def main() -> None:
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=size)
    model = build()
    optimizer = sgd(model)
    for _ in range(3):
        step(model, optimizer)
    print("pausing", flush=True)  # noqa: T201
    if dist.get_rank() == 1:
        time.sleep(60)
    step(model, optimizer)


if __name__ == "__main__":
    main()
