"""A program for torchrun in which the second rank ends, and the others because of it. tests/helpers/failing_rank.py
FAULT [record]"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from tests.helpers.two_layers import build, raise_in_forward, sgd, step


def main() -> None:
    fault = sys.argv[1]
    dist.init_process_group("gloo")
    model = build()
    optimizer = sgd(model)
    step(model, optimizer)
    if dist.get_rank() == 1:
        if fault == "raises":
            raise ValueError("raised by rank 1")
        if fault == "raises in forward":
            raise_in_forward(model)
            try:
                step(model, optimizer)
            finally:
                time.sleep(1.5)  # longer than others need to raise
        if fault == "exits":
            sys.exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    step(model, optimizer)


if __name__ == "__main__":
    (record(main) if "record" in sys.argv else main)()
