"""Meshes, process groups, and the sharding of each parameter."""
