"""A functional all-gather over gloo that does not corrupt memory.

Each of gloo's two worker threads writes the name of the operation that it finished into one ``std::string`` of the
process group, without a lock. A name of more than 15 characters is on the heap, so two all-gathers of functional
collectives (``ALLGATHER_COALESCED``) that end at the same time free it twice. ``full_tensor()`` and ``redistribute()``
of DTensors launch them: two at once for a tensor subclass of two inner tensors, and any number where results are used
later. The variant with ``out`` does the same in the same order, and its name is short. ``docs/upstream.md`` has a
program without this library.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as _functional_collectives  # which defines the operators

from composable_fsdp._core.memory import backend_capabilities


def _all_gather(input: torch.Tensor, group_size: int, name: Any) -> torch.Tensor:
    c10d, ops = cast(Any, dist.distributed_c10d), torch.ops._c10d_functional
    group = c10d._resolve_process_group(name) if isinstance(name, str) else name
    if not backend_capabilities(group, "cpu").has_own_transports:  # not gloo: what torch itself does
        output: torch.Tensor = ops.all_gather_into_tensor_coalesced([input], group_size, name)[0]
    elif input.is_complex():
        output = torch.view_as_complex(_all_gather(torch.view_as_real(input), group_size, name))
    else:
        output = input.new_empty((group_size * (input.shape[0] if input.ndim else 1), *input.shape[1:]))
        ops.all_gather_into_tensor_out(input, group_size, name, out=output)
    return output


FUNCTIONAL_ALL_GATHER = torch.library.Library("_c10d_functional", "IMPL")
"""The replacement, which lasts as long as this object. Importing this module makes it, for CPU tensors."""
FUNCTIONAL_ALL_GATHER.impl("all_gather_into_tensor", _all_gather, "CPU")
