"""A communicator whose all-gather or reduce-scatter is a callable of the user.

The callables have the interface of ``torch.distributed.fsdp``'s ``AllGather`` and ``ReduceScatter``: ``allocate(size,
*, dtype, device)`` returns a message buffer, and the call launches the collective and returns a work, or ``None`` if it
is already done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from composable_fsdp._comm.c10d import OPERATIONS, WorkList
from composable_fsdp._comm.communicator import (
    SUM,
    Around,
    Collective,
    Communicator,
    GroupCommunicator,
    Traits,
    Transfer,
    Work,
    is_over_group,
)
from composable_fsdp._layout.grad_scaling import ReduceOp
from composable_fsdp.errors import ArgumentTypeError

__all__ = ["CustomCollective", "CustomCommunicator", "customize"]


class CustomCollective(Protocol):
    """The argument type of ``set_custom_all_gather`` and ``set_custom_reduce_scatter``."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate a 1-d message buffer of ``size`` elements."""
        ...

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, *args: Any, **kw: Any
    ) -> Work | None:
        """Launch. An all-gather gets the keyword ``async_op``, a reduce-scatter ``op``, a ``dist.ReduceOp``."""
        ...


class CustomCommunicator(Around):
    """Collectives of one kind are launched by ``collective``, a callable of the user.

    All parameters of a group and dtype share one message, so that ``allocate`` is called for all of them.

    Args:
        base: the communicator of the other kinds.
        kind: an all-gather or a reduce-scatter.
        collective: the user's collective.
        all_gather_options: returns additional keywords for an all-gather.
    """

    def __init__(
        self,
        base: GroupCommunicator,
        kind: Collective,
        collective: CustomCollective,
        all_gather_options: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        super().__init__(base, kind, collective, all_gather_options)
        self.traits = Traits(averages=base.traits.averages)
        self._kind, self._collective, self._options = kind, collective, all_gather_options

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._collective.allocate((numel,), dtype=dtype, device=device)

    def launch(self, kind: Collective, transfers: Sequence[Transfer], label: str = "", op: ReduceOp = SUM) -> Work:
        if kind is not self._kind:
            return self.base.launch(kind, transfers, label, op)
        options = self._options() if kind is Collective.ALL_GATHER else {"op": OPERATIONS[op]}
        call, group = self._collective, self.group
        works = [call(output_tensor=t.output, input_tensor=t.input, group=group, **options) for t in transfers]
        return WorkList(tuple(work for work in works if work is not None))


def customize(
    base: Communicator,
    kind: Collective,
    collective: object,
    all_gather_options: Callable[[], Mapping[str, Any]] = dict,
) -> Communicator:
    """Return ``base`` with one kind replaced by ``collective``, or ``base`` itself if its axis has one rank.

    Raises:
        ArgumentTypeError: ``collective`` lacks ``allocate`` or cannot be called.
    """
    allocate: Callable[..., Any] | None = getattr(collective, "allocate", None)
    if not callable(collective) or not callable(allocate):
        raise ArgumentTypeError(
            f"set_custom_{kind.value} takes an object with allocate(size, *, dtype, device) that can be called with "
            f"(output_tensor, input_tensor, group, ...), not {type(collective).__name__}."
        )
    if not is_over_group(base):
        return base
    return CustomCommunicator(base, kind, collective, all_gather_options)  # type: ignore[arg-type]
