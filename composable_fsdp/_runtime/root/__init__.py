"""The iteration of a root module: its passes, prefetching, reductions in flight, and recovery."""
