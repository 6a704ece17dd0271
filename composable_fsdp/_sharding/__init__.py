"""Meshes, process groups, and how each parameter is sharded on them."""
