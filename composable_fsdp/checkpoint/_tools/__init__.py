"""Commands that inspect, verify and convert checkpoints."""
