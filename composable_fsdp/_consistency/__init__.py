"""Checks that all ranks do the same, and reports of where each rank is when one waits too long."""
