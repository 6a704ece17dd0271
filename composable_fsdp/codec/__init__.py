"""How a bucket's shards become what travels, and how gathered bytes become parameters."""
