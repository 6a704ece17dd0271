"""Shared parts of the programs in ``examples/``: a byte-level transformer, its text, and reports of a run."""
