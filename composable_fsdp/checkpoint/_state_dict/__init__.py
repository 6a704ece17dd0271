"""State dicts of sharded models and optimizers."""
