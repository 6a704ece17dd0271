"""Communicators: the collectives of one mesh axis, launched without waiting, for several transports."""
