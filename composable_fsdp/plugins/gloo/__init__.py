"""Collectives over gloo: connections between ranks, and the messages on them."""
