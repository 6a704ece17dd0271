"""The errors and warnings of this library. The type says whose fault it is; the text says where, what, and what to do.

Each also derives from the builtin that fits, so ``except ValueError`` written for torch's own API catches it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NoReturn

__all__ = [
    "ArgumentTypeError",
    "CheckpointError",
    "ConfigurationError",
    "ConflictError",
    "DeviceError",
    "DivergenceError",
    "ExecutionOrderWarning",
    "ExtensionError",
    "FSDPError",
    "FlushError",
    "GradientError",
    "LifecycleError",
    "LostExtensionWarning",
    "MeshError",
    "MissingNameError",
    "OffloadBackendWarning",
    "ParameterError",
    "PeerError",
    "PlainParameterWarning",
    "ShardDimError",
    "UnsavableStateWarning",
    "UnsupportedError",
    "UntestedTorchWarning",
    "printable",
]


def printable(text: str, kept: str = "\n\t") -> str:
    """Return ``text`` with an escape such as ``\\x1b`` for each character that a terminal would not only show.

    Texts of files and of other ranks are shown so, because the controls of ASCII and C1 clear or rename a terminal and
    write to its clipboard, and those of Unicode reorder what is shown. ``kept`` are controls to leave.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


_MOST_CHARACTERS = 1 << 20


class FSDPError(Exception):
    """Base of every exception that this library raises on purpose. Its text has only printable characters.

    A file or another rank may have given a part of the text, so that one of more than a million characters is cut.
    """

    def __str__(self) -> str:
        text = super().__str__()
        more = len(text) - _MOST_CHARACTERS
        return printable(text if more <= 0 else f"{text[:_MOST_CHARACTERS]} (and {more} characters more)")


class ConfigurationError(FSDPError, ValueError):
    """An argument of ``fully_shard`` or of one of its setters does not make sense."""


class ArgumentTypeError(ConfigurationError, TypeError):
    """An argument of ``fully_shard`` or of one of its setters has a wrong type, or an unknown name."""

    @staticmethod
    def of_keyword(call: str, name: str, known: Iterable[str]) -> ArgumentTypeError:
        """Return the error for the unknown keyword ``name``. It says which one of ``known`` is the most similar."""
        meant = difflib.get_close_matches(name, known, 1)
        advice = f" Did you mean {meant[0]!r}?" if meant else ""
        return ArgumentTypeError(f"{call}() got an unexpected keyword argument {name!r}.{advice}")


class ConflictError(ConfigurationError, AssertionError):
    """Two calls exclude each other. FSDP2 raises ``AssertionError`` in these cases."""


class MeshError(ConfigurationError):
    """The device mesh, or one of its process groups, does not fit the request."""


class ParameterError(FSDPError, ValueError):
    """A parameter cannot be sharded, or has changed since it was sharded. The text names it."""


class ShardDimError(ParameterError, AssertionError):
    """``shard_placement_fn`` returned a dim that the parameter does not have. FSDP2 raises ``AssertionError``."""


class DeviceError(ParameterError, RuntimeError):
    """Parameters are on the meta device, or not on the device on which their group keeps them. The text names them."""


class ExtensionError(ParameterError, AssertionError):
    """The communication hooks of a parameter's local tensor do not have the required form."""


class LifecycleError(FSDPError, RuntimeError):
    """An operation was called in a state in which it is not legal."""


class FlushError(FSDPError, ValueError):
    """Changed weights that a receiver cannot apply: damaged, not the next ones, or of other tensors."""


class GradientError(FSDPError, RuntimeError):
    """Gradients have values for which the operation makes no sense."""


class PeerError(FSDPError, RuntimeError):
    """Another rank is gone, or did not answer in time. The text names it and the operation, if known."""

    def __init__(self, text: str = "", ranks: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)
        """The global ranks whose fault it is, as far as known."""


class DivergenceError(FSDPError, RuntimeError):
    """Ranks that must make the same calls in the same order do not."""


class CheckpointError(FSDPError, RuntimeError):
    """A checkpoint or state dict is damaged, incomplete, or of another model. The text says what is wrong and where."""


class UnsupportedError(FSDPError, NotImplementedError):
    """A part of the FSDP2 interface that this version does not support. The text says what to do instead."""


class MissingNameError(UnsupportedError, AttributeError):
    """A name of torch's FSDP2, or of an earlier version, that does not exist here. The text says what to use."""


class ExecutionOrderWarning(UserWarning):
    """This rank's forward ran its modules in another order than in the first iteration."""


class LostExtensionWarning(UserWarning):
    """A tensor's all-gather hooks were lost, so its parameter is communicated like a plain one."""


class OffloadBackendWarning(UserWarning):
    """Shards are on CPU, and a process group of their mesh has no backend for CPU tensors."""


class PlainParameterWarning(UserWarning):
    """Trainable parameters were added to a sharded model."""


class UnsavableStateWarning(UserWarning):
    """An optimizer keeps state of a tensor class that no checkpoint can have."""


class UntestedTorchWarning(UserWarning):
    """The installed torch is newer than those with which this library was tested."""


def __getattr__(name: str) -> NoReturn:
    from composable_fsdp._other_names import missing

    missing(__name__, name)
