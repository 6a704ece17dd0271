"""The console command ``composable-fsdp``, also ``python -m composable_fsdp``. It needs no packages beside torch's."""

from composable_fsdp.cli.app import main

__all__ = ["main"]
