"""Tensors in the arguments and outputs of modules, and the containers that hold them.

Containers are tuples, lists, deques, mappings and dataclasses, and the classes that are registered with torch's pytree.
One in which a module can write is *mutable*: lists, deques, mutable mappings, and dataclasses that are not frozen. The
others are rebuilt when a tensor in them changes.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from operator import is_
from typing import TypeAlias

import torch
from torch.utils import _pytree as pytree
from torch.utils._pytree import PyTree

from composable_fsdp.errors import ConfigurationError

Map = Callable[[torch.Tensor], torch.Tensor]
Items = dict[PyTree, PyTree]

InputView: TypeAlias = tuple[torch.Tensor, int]
"""A view, made for one call, of an input that needs a gradient, and its version when it was made.

A hook on its node costs half as much as a hook on the tensor. An in-place change gives the view another node.
"""

_ATOMS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size})
"""Types without tensors, checked first because a pytree traversal costs more than the rest of a hook."""


def tensors_in(tree: PyTree) -> list[torch.Tensor]:
    """Return every tensor in ``tree``, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if type(tree) in _ATOMS:
        return []
    return [tensor for child in _children(tree) for tensor in tensors_in(child)]


def map_tensors(function: Map, tree: PyTree, container: Callable[[PyTree], PyTree] | None = None) -> PyTree:
    """Return ``tree`` with ``function`` applied to every tensor, or the same object if no tensor changed.

    ``container``, if given, is called with each object in ``tree`` that is neither a tensor nor a tuple of them, and
    returns what to use in its place.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    kind = type(tree)
    if kind in _ATOMS:
        return tree
    if kind is tuple:
        mapped = [
            function(child) if isinstance(child, torch.Tensor) else map_tensors(function, child, container)
            for child in tree
        ]
        return tree if all(map(is_, mapped, tree)) else tuple(mapped)
    if container is not None:
        return container(tree)
    return _rebuilt(tree, lambda child: map_tensors(function, child))


def cycle_error(place: str) -> ConfigurationError:
    """Return the error for a container at ``place``, such as "an input of 'layers.3'", that contains itself."""
    return ConfigurationError(
        f"{place} is a container that contains itself, or is nested more deeply than Python can follow, so its tensors "
        "cannot be found. Pass or return containers without cycles."
    )


# -- what containers hold


def _items(tree: PyTree) -> Items | None:
    """Return what a mutable container or a frozen dataclass holds, by index, key or name; ``None`` for other objects.

    A dataclass that is a mapping too, such as an output of transformers, has its items under ``(key,)``.
    """
    if isinstance(tree, (list, deque, UserList)):
        return dict(enumerate(tree))
    mapping = dict(tree) if isinstance(tree, MutableMapping) else None
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _attributes(tree) | {(key,): item for key, item in (mapping or {}).items()}
    return mapping


def _attributes(tree: PyTree) -> Items:
    slots = [name for kind in type(tree).__mro__ for name in getattr(kind, "__slots__", ())]
    names = dict.fromkeys((*slots, *getattr(tree, "__dict__", ())))
    return {n: getattr(tree, n) for n in names if n not in ("__dict__", "__weakref__") and hasattr(tree, n)}


def _shown(tree: PyTree, items: Items) -> Items:
    """Return those of ``items`` in which tensors are looked for: of a dataclass, its fields only."""
    if not dataclasses.is_dataclass(tree):
        return items
    fields = {field.name for field in dataclasses.fields(tree)}
    return {key: item for key, item in items.items() if key in fields or isinstance(key, tuple)}


def _fill(tree: PyTree, items: Items) -> None:
    """Make ``items``, in the form of :func:`_items`, everything that ``tree`` holds. The order of keys counts."""
    # Remove what is not wanted, or all if the order differs.
    now, is_record = _items(tree), dataclasses.is_dataclass(tree)
    assert now is not None
    if is_record:
        for key in now.keys() - items.keys():
            if isinstance(key, tuple):
                del tree[key[0]]
            else:
                object.__delattr__(tree, key)
    elif list(now) != list(items):
        tree.clear()
        now = {}
        if not isinstance(tree, MutableMapping):
            tree.extend(items.values())
            return
    for key, item in items.items():
        if key in now and now[key] is item:
            continue
        if is_record and not isinstance(key, tuple):
            object.__setattr__(tree, key, item)  # frozen dataclasses too
        else:
            tree[key[0] if is_record else key] = item


def _copy_with(tree: PyTree, items: Items) -> PyTree:
    new = copy.copy(tree)
    if isinstance(tree, MutableMapping) and not isinstance(tree, (dict, UserDict)):  # it may keep items in its own dict
        vars(new).update({n: copy.copy(v) for n, v in vars(new).items() if isinstance(v, (dict, list))})
    _fill(new, items)
    return new


def _is_value(tree: PyTree) -> bool:
    """Return True for tuples and frozen dataclasses, in which a module does not write."""
    params: PyTree = getattr(type(tree), "__dataclass_params__", None)
    return isinstance(tree, tuple) or (params is not None and params.frozen)


def _registered(tree: PyTree) -> tuple[list[PyTree], Callable[[list[PyTree]], PyTree]] | None:
    """Return the children of an object of a registered class, and the function that makes one of other children.

    ``tree_flatten`` with ``is_leaf`` would leave a reference cycle, which keeps the object.
    """
    kind = pytree._get_node_type(tree)
    if kind not in pytree.SUPPORTED_NODES:
        return None
    node = pytree.SUPPORTED_NODES[kind]
    children, context = node.flatten_fn(tree)
    return list(children), lambda new: node.unflatten_fn(new, context)


def _children(tree: PyTree) -> PyTree:
    if type(tree) is tuple or type(tree) is list:
        return tree
    items = _items(tree)
    if items is not None:
        return _shown(tree, items).values()
    registered = _registered(tree)
    if registered is not None:
        return registered[0]
    return tree.values() if isinstance(tree, Mapping) else ()


def _rebuilt(tree: PyTree, function: Callable[[PyTree], PyTree]) -> PyTree:
    """Return a container with ``function`` applied to every child, or the same object if no child changed."""
    items = _items(tree)
    if items is not None:
        shown = _shown(tree, items)
        new = {id(item): function(item) for item in {id(item): item for item in shown.values()}.values()}
        mapped = items | {key: new[id(item)] for key, item in shown.items()}  # an object under two keys is mapped once
        return tree if _same(items, mapped) else _copy_with(tree, mapped)
    registered = _registered(tree)
    if registered is None:
        return tree
    children, build = registered
    changed = list(map(function, children))
    return tree if all(map(is_, changed, children)) else build(changed)


def _same(items: Items, others: Items) -> bool:
    """Return True if both have the same keys in the same order, and the same objects."""
    return list(items) == list(others) and all(map(is_, items.values(), others.values()))


def _is_cast(before: PyTree, after: PyTree) -> bool:
    """Return True if a tensor in ``after`` is a cast or a copy on another device, and not a view."""
    if after is before:
        return False
    if isinstance(after, torch.Tensor):
        return (after.dtype, after.device) != (before.dtype, before.device)
    return any(map(_is_cast, _children(before), _children(after)))


def _version_of(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


# -- the inputs of a call


@dataclasses.dataclass(slots=True, eq=False)
class _Passed:
    """A container of the caller, what the module got for it, and what both held when the call began.

    ``items`` is ``None`` for a registered class, and ``mapped`` has the leaves of what the module got, if it is a copy.
    """

    tree: PyTree
    given: PyTree
    items: Items | None
    mapped: Items


_NONE: list[PyTree] = []
_NOTHING: dict[int, PyTree] = {}
"""The containers of a call that has none, as most calls. Nothing is written to these two."""


# Note: the tensors of a container
#
# For a call with a list of one fp32 tensor ``t`` that is cast to ``c``:
#   containers   one _Passed: ``tree`` the caller's list, ``given`` a copy, ``items`` {0: t}, ``mapped`` {0: c}
#   _known       that _Passed, by the ids of the caller's list and of the copy
#   mapped       id(t): c               _originals   id(c): t
#   _casts       id(c): c, its version  _untouched   id(t): t, its version
# If ``t`` is only watched, its view takes the place of ``c``, in the caller's list itself; it is not in ``_casts``.


class CallInputs:
    """The inputs of one call as its module gets them: moved, cast, and watched by views if they need a gradient.

    Invariant: what a module writes into a mutable container of the caller is there when the call ends, also if it
    raises, and all else in the container is what it was. The module gets the container itself, in which views take the
    place of watched tensors until the call ends. If a tensor in it is moved or cast, the module gets a copy, because a
    recomputation inside the module needs the cast tensors after the call too.

    Of a registered class, the module gets the object itself if no tensor is moved or cast. Its tensors are not watched,
    so no hook shows the end of the call's backward.
    """

    # Of calls without containers. An assignment to each in ``__init__`` would take host time in every call.
    containers: list[_Passed] = _NONE
    """The mutable containers, inner ones first."""
    _known: dict[int, _Passed] = _NOTHING
    """The containers by the ids of those of the caller and of those that the module got."""
    _casts: dict[int, InputView] = _NOTHING
    """The casts in containers, and their versions."""
    _untouched: dict[int, InputView] = _NOTHING
    """The caller's tensors in containers, and their versions."""

    def __init__(
        self, device: torch.device | None, dtype: torch.dtype | None, *, watched: bool, watches_all: bool = False
    ) -> None:
        self._device, self._dtype, self._watched = device, dtype, watched
        self.watches_all = watches_all
        """True in a transform, where an input hides the gradients that other levels need."""
        self.mapped: dict[int, torch.Tensor] = {}
        """The tensor that the module gets, by the id of the tensor of the caller."""
        self._originals: dict[int, torch.Tensor] = {}
        """The caller's tensors, by the id of the view, or of the cast in a container, that stands for them."""
        self.views: list[InputView] = []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that the module gets for ``tensor``, each time the same."""
        known = self.mapped.get(id(tensor))
        if known is not None:
            return known
        mapped = tensor
        # Move, then cast.
        if self._device is not None and tensor.device != self._device:
            mapped = mapped.to(self._device, non_blocking=True)
        if self._dtype is not None and tensor.is_floating_point():
            mapped = mapped.to(self._dtype)
        # Watch by a view, whose node belongs to this call alone.
        if self._watched and (mapped.requires_grad or self.watches_all):
            if mapped is tensor:
                mapped = mapped.view_as(mapped)
                self._originals[id(mapped)] = tensor
            self.views.append((mapped, mapped._version))
        self.mapped[id(tensor)] = mapped
        return mapped

    def container(self, tree: PyTree) -> PyTree:
        """Return the container that the module gets for ``tree``, which is not a plain tuple."""
        if self._known is _NOTHING:
            self.containers, self._known, self._casts, self._untouched = [], {}, {}, {}
        # The same container twice is one container.
        known = self._known.get(id(tree))
        if known is not None:
            return known.given
        items = None if _is_value(tree) else _items(tree)
        if items is None:
            return self._without_views(tree)
        # Views go into the container itself; casts into a copy.
        take = partial(map_tensors, self._in_container, container=self.container)
        mapped, given = items | {key: take(item) for key, item in _shown(tree, items).items()}, tree
        if any(map(_is_cast, items.values(), mapped.values())):
            given = _copy_with(tree, mapped)
        else:
            _fill(tree, mapped)
        return self._pass(_Passed(tree, given, items, mapped))

    def _without_views(self, tree: PyTree) -> PyTree:
        """Return a rebuilt tuple or frozen dataclass; an object of a registered class as it is, if nothing is cast."""
        given = _rebuilt(tree, partial(map_tensors, self._in_container, container=self.container))
        if _is_value(tree):
            return given
        tensors = tensors_in(tree)
        if given is tree or not _is_cast(tree, given):
            given = tree
            if self._watched:
                self.views.extend((tensor, -1) for tensor in tensors if tensor.requires_grad)
        leaves = {} if given is tree else dict(enumerate(pytree.tree_leaves(given)))
        return self._pass(_Passed(tree, given, None, leaves)) if tensors or _children(tree) else tree

    def _pass(self, passed: _Passed) -> PyTree:
        self._known[id(passed.tree)] = self._known[id(passed.given)] = passed
        self.containers.append(passed)
        return passed.given

    def _in_container(self, tensor: torch.Tensor) -> torch.Tensor:
        mapped = self(tensor)
        self._untouched[id(tensor)] = tensor, _version_of(tensor)
        if mapped is not tensor and id(mapped) not in self._originals:
            self._originals[id(mapped)] = tensor
            self._casts[id(mapped)] = mapped, _version_of(mapped)
        return mapped

    # -- the end of the call

    def written(self) -> list[torch.Tensor]:
        """Return the caller's tensors that need a gradient since the module changed them in place."""
        tensors = [self._originals.get(id(mapped), mapped) for mapped in self.mapped.values()]
        changed = {id(view) for view, version in self.views if view._version != version} - self._casts.keys()
        return [
            tensor
            for tensor, mapped in zip(tensors, self.mapped.values(), strict=True)
            if tensor.requires_grad and tensor.grad_fn is not None and (mapped is tensor or id(mapped) in changed)
        ]

    def give_back(self) -> None:
        """Write what the module wrote into the caller's containers, and the caller's tensors in place of views."""
        for passed in reversed(self.containers):
            tree, given, items, mapped = passed.tree, passed.given, passed.items, passed.mapped
            if items is None:
                leaves = {} if given is tree else dict(enumerate(pytree.tree_leaves(given)))
                if not _same(mapped, leaves) or any(map(self._is_written, tensors_in(given) if leaves else ())):
                    restored = _rebuilt(given, self._restored)
                    for name, item in _attributes(restored).items():
                        object.__setattr__(tree, name, tree if item is restored else item)
                continue
            # What the module wrote stays; all else is what it was before.
            now = _items(given)
            assert now is not None
            after = dict(now)
            for key, item in _shown(given, now).items():
                may_be_written = tensors_in(item) if self._casts else ()
                is_written = item is not mapped.get(key, self) or any(map(self._is_written, may_be_written))
                after[key] = self._restored(item) if is_written else items[key]
            if given is tree or not _same(items, after):
                _fill(tree, after)

    def _restored(self, tree: PyTree) -> PyTree:
        """Return what the module wrote with the caller's tensors and containers in place of those that it got."""

        return map_tensors(self._original, tree, self._restored_container)

    def _restored_container(self, tree: PyTree) -> PyTree:
        known = self._known.get(id(tree))
        return _rebuilt(tree, self._restored) if known is None else known.tree

    def _original(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._is_written(tensor) else self._originals.get(id(tensor), tensor)

    def _is_written(self, tensor: torch.Tensor) -> bool:
        """Return True for a cast that the module changed in place."""
        if id(tensor) not in self._casts:
            return False
        if tensor.is_inference():  # without a version
            return not torch.equal(tensor, self._originals[id(tensor)].to(tensor))
        return tensor._version != self._casts[id(tensor)][1]

    # -- the output

    def map_output(self, function: Map, output: PyTree, *, and_written: bool = False) -> PyTree:
        """Return ``output`` with ``function`` applied to every tensor. Containers of the caller stay the same objects.

        In those that are in ``output``, or in all if ``and_written``, it is applied to what the module wrote.
        """
        for passed in self.containers if and_written else ():
            self._mapped_container(function, passed.tree)
        return map_tensors(function, output, partial(self._mapped_container, function))

    # No function below refers to itself: such a cycle would keep the inputs of a call until the garbage collector runs.

    def _mapped_container(self, function: Map, tree: PyTree) -> PyTree:
        known, container = self._known.get(id(tree)), partial(self._mapped_container, function)
        if known is None:
            return _rebuilt(tree, lambda child: map_tensors(function, child, container))
        items = None if known.items is None else _items(known.tree)
        if items is not None:
            written = partial(self._mapped_if_written, function)
            shown = _shown(known.tree, items).items()
            _fill(known.tree, items | {key: map_tensors(written, item, container) for key, item in shown})
        return known.tree

    def _mapped_if_written(self, function: Map, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if id(tensor) in self._untouched else function(tensor)

    def outputs(self, output: PyTree) -> list[torch.Tensor]:
        """Return the tensors in ``output``, and those that the module wrote or changed in containers of the caller."""
        found = list(self._tensors_outside(output))
        for passed in self.containers:
            for child in _children(passed.tree):
                found += filter(self._is_new_or_changed, self._tensors_outside(child))
        return found

    def _tensors_outside(self, tree: PyTree) -> Iterator[torch.Tensor]:
        """Yield every tensor in ``tree``, without those in containers of the caller."""
        if isinstance(tree, torch.Tensor):
            yield tree
        elif type(tree) not in _ATOMS and id(tree) not in self._known:
            for child in _children(tree):
                yield from self._tensors_outside(child)

    def _is_new_or_changed(self, tensor: torch.Tensor) -> bool:
        untouched = self._untouched.get(id(tensor))
        return untouched is None or (tensor.requires_grad and tensor._version != untouched[1])


NO_INPUTS = CallInputs(None, None, watched=False)
"""The inputs of all calls that get theirs unchanged. Nothing is written to it."""
