"""The collectives of one mesh axis, launched without waiting, on several transports."""
