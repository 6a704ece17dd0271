"""Communication streams, the store of sharded parameters, and the buffers of unsharded parameters."""
