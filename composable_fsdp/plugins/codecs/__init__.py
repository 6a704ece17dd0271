"""Codecs in all-gathers and reductions."""
