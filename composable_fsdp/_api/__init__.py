"""The implementation of the public functions: sharding a module, and what its methods do."""
