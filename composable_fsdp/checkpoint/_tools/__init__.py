"""Command-line tools that inspect, verify and convert checkpoints."""
