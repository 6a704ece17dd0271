"""The most memory that a step takes."""

from __future__ import annotations

import gc
from itertools import accumulate

from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

__all__ = ["peak_above_idle"]


def peak_above_idle(model: nn.Module, x: Tensor) -> int:
    """Bytes that a step takes beyond what there was before it, by every allocation of torch in it."""
    for _ in range(2):  # until the order is known
        model(x).sum().backward()
        model.zero_grad()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, record_function("step"):
        model(x).sum().backward()
    events = profiler.profiler.kineto_results.events()
    sizes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return int(max(accumulate(nbytes for _, nbytes in sorted(sizes, key=lambda size: size[0]))))
