"""The runtime of sharded modules: hooks, parameter groups, collectives and the iteration of a root."""
