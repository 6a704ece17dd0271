"""``python -m composable_fsdp``: the same as the console command ``composable-fsdp``."""

from composable_fsdp.cli import main

if __name__ == "__main__":
    main("python -m composable_fsdp")
