"""State dicts of sharded models and optimizers, and checkpoints on disk."""
