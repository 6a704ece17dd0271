"""The memory of activations and of their gradients in a backward, read from the autograd graph before it runs.

A node of the graph holds the tensors that its forward has saved until it has run, and the gradients of its outputs and
inputs while it runs. Nodes run in the reverse order of their creation, as soon as the gradients of their outputs are
complete. So the bytes at each point of a backward follow from the graph, without running it.

Left out are tensors that custom functions keep by other means, temporary memory of kernels, and what comes before the
given node: the incoming gradient, and the graph of a loss outside of the model.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from composable_fsdp._runtime.schedule.costs import ActivationMemory

__all__ = ["HasHooksError", "activation_memory"]

_PASSING_OPERATIONS = "Add Alias Clone Permute Squeeze Sum T Transpose UnsafeView Unsqueeze View"
_PASSING = frozenset(f"{name}Backward{overload}" for name in _PASSING_OPERATIONS.split() for overload in (0, 1, 2))
"""The nodes that give their incoming gradient, or a view of it, to their inputs."""

_RUNS_AT_ONCE = -(1 << 62)
"""The priority of a node that accumulates a parameter's gradient, which autograd runs before all others."""


class HasHooksError(Exception):
    """A saved tensor has hooks, as under activation checkpointing, so that its bytes are not known."""


def activation_memory(node: Any, parameters: Mapping[int, tuple[str, int]]) -> tuple[ActivationMemory, ...]:
    """Return the memory at the gradient of each parameter, in the order in which the gradients become ready.

    Args:
        node: the node with which the backward begins, as ``torch._C._current_autograd_node()`` returns it in a hook.
        parameters: group and index of each unsharded parameter, by its ``id``.

    Raises:
        HasHooksError: a saved tensor has hooks.
    """
    return tuple(_Backward(node).run(parameters))


@dataclass
class _Gradient:
    """The memory of a gradient, and the number of nodes that hold it."""

    nbytes: int
    holders: int = 1


class _Backward:
    """A backward whose gradients are numbers of bytes."""

    def __init__(self, first: Any) -> None:
        self._first = first
        nodes = _reachable(first)
        leaves = {_key(tensor) for node in nodes if _is_leaf(node) for tensor in _plain(node.variable)}
        self._bytes: dict[int, int] = {}
        """The bytes of each storage of saved tensors."""
        self._saved: dict[Any, list[int]] = {}
        """The storages that each node holds."""
        for node in nodes:
            storages = {key: size for key, size in _saved_storages(node).items() if key not in leaves}
            self._saved[node] = list(storages)
            self._bytes |= storages
        self._holders = Counter(key for keys in self._saved.values() for key in keys)
        """The number of nodes that hold each storage and have not run."""
        self._missing = Counter(other for node in nodes for other, _ in node.next_functions if other is not None)
        """The gradients that each node still waits for."""
        self._gradients: defaultdict[Any, dict[int, _Gradient]] = defaultdict(dict)
        """The gradients of the outputs of each node."""
        self._now = sum(self._bytes.values())
        """The bytes of saved tensors and gradients."""
        self._peak = 0
        """The most bytes since the gradient of a parameter was last ready."""

    def run(self, parameters: Mapping[int, tuple[str, int]]) -> Iterator[ActivationMemory]:
        """Run the backward, and yield the memory at the gradient of each of the ``parameters``."""
        self._gradients[self._first][0] = _Gradient(0)  # a loss that is a sum gives one number, expanded
        ready, count = [(0, 0, self._first)], 0
        while ready:
            node = heapq.heappop(ready)[-1]
            incoming = self._gradients.pop(node, {})
            if _is_leaf(node):
                self._drop(incoming.values())
                known = parameters.get(id(node.variable))
                if known is not None:
                    yield ActivationMemory(*known, self._peak, self._now)
                    self._peak = self._now
                continue
            self._run_node(node, list(incoming.values()))
            for other, _ in node.next_functions:
                self._missing[other] -= 1
                if other is not None and not self._missing[other]:
                    count += 1
                    heapq.heappush(ready, (_RUNS_AT_ONCE if _is_leaf(other) else -other._sequence_nr(), count, other))

    def _run_node(self, node: Any, incoming: Sequence[_Gradient]) -> None:
        passed = incoming[0] if incoming and node.name() in _PASSING else None
        outgoing = []
        for other, number in node.next_functions:
            if other is None:
                continue
            if passed is None:
                gradient = _Gradient(_gradient_bytes(other, number))
                self._now += gradient.nbytes
            else:
                gradient = passed
                gradient.holders += 1
            outgoing.append((self._gradients[other], number, gradient))
        self._peak = max(self._peak, self._now)
        for key in self._saved[node]:
            self._holders[key] -= 1
            if not self._holders[key]:
                self._now -= self._bytes[key]
        self._drop(incoming)
        for gradients, number, gradient in outgoing:
            if number not in gradients:
                gradients[number] = gradient
                continue
            # One is added to the other: to the larger, because the incoming gradient counts no bytes.
            smaller, gradients[number] = sorted((gradients[number], gradient), key=lambda each: each.nbytes)
            self._drop([smaller])

    def _drop(self, gradients: Iterable[_Gradient]) -> None:
        for gradient in gradients:
            gradient.holders -= 1
            if not gradient.holders:
                self._now -= gradient.nbytes


def _reachable(first: Any) -> list[Any]:
    found, left = dict.fromkeys([first]), [first]
    while left:
        for node, _ in left.pop().next_functions:
            if node is not None and node not in found:
                found[node] = None
                left.append(node)
    return list(found)


def _is_leaf(node: Any) -> bool:
    return hasattr(node, "variable")


_names_of_saved: dict[str, tuple[str, ...]] = {}
"""The attributes of saved tensors, by the name of a node."""


def _saved_storages(node: Any) -> dict[int, int]:
    """Return the bytes of the storages of the tensors that ``node`` has saved, by a key of the storage."""
    kind = node.name()
    names = _names_of_saved.get(kind)
    if names is None:
        names = _names_of_saved[kind] = tuple(name for name in dir(node) if name.startswith("_raw_saved_"))
    storages: dict[int, int] = {}
    for name in names:
        saved = getattr(node, name)
        for each in saved if isinstance(saved, tuple | list) else (saved,):
            if each is None:
                continue
            if each.unpack_hook is not None:
                raise HasHooksError
            if isinstance(each.data, torch.Tensor):
                storages |= {_key(tensor): tensor.untyped_storage().nbytes() for tensor in _plain(each.data)}
    return storages


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of which ``tensor`` is made, such as the local tensor of a ``DTensor``."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for part in (getattr(tensor, name) for name in flatten()[0]):
        if isinstance(part, torch.Tensor):
            yield from _plain(part)


def _key(tensor: torch.Tensor) -> int:
    return cast(int, tensor.untyped_storage()._cdata)


def _gradient_bytes(node: Any, number: int) -> int:
    """Return the bytes of the gradient of an output of ``node``."""
    if _is_leaf(node):
        return sum(tensor.nbytes for tensor in _plain(node.variable))
    metadata = node._input_metadata[number]
    return int(torch.Size(metadata.shape).numel() * metadata.dtype.itemsize)
