"""Collectives through shared memory between ranks on one host."""
