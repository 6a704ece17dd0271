"""Coordination of ranks during a save or load: rank group, error texts and pending saves."""
