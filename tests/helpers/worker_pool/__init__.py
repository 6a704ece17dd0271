"""Processes for ``run_ranks`` of the tests: forked from templates, and made alike before each call."""
