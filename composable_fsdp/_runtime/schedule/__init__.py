"""Decisions about when to all-gather, keep and free parameter groups. Pure: names and numbers only."""
