"""Parameter groups: the parameters of one fully_shard call, unsharded and freed together."""
