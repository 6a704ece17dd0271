"""Sharded parameters and the places in modules where they are registered."""
