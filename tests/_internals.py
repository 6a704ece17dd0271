"""Private names of the library that tests use, imported here alone, so that a move changes one file of tests.

Older tests still import such names themselves.
"""

from __future__ import annotations

from composable_fsdp.runtime import company
from composable_fsdp.runtime.parameter import ShardedParameter
from composable_fsdp.runtime.unsharding import Unsharding

__all__ = ["ShardedParameter", "Unsharding", "company"]
