"""Names of a package that are imported when a program first uses them, since few programs need all."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any


class FirstUse:
    """Finds the names of ``package``, for its ``__getattr__``.

    Args:
        package: its full name.
        names: the names in each module, separated by spaces, by the name of the module in the package.
    """

    def __init__(self, package: str, names: Mapping[str, str]) -> None:
        self._package = package
        self._module_of = {name: module for module, listed in names.items() for name in listed.split()}

    def __contains__(self, name: str) -> bool:
        return name in self._module_of

    def __getitem__(self, name: str) -> Any:
        """Import ``name``, and keep it as an attribute of the package.

        Raises:
            AttributeError: the package has no such name.
        """
        if name not in self._module_of:
            raise AttributeError(f"module {self._package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{self._package}.{self._module_of[name]}"), name)
        setattr(sys.modules[self._package], name, value)
        return value
