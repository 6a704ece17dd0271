"""Decisions about when to gather, keep and free parameter groups. Pure: names and numbers only."""
