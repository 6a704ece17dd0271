"""Checks that all ranks run the same program, and reports of where each rank is when one waits too long."""
