"""Coordination of ranks during a save or load: rank group, error texts, pending saves and progress bars."""
