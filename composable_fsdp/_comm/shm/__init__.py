"""Collectives through shared memory, for ranks of one host."""
