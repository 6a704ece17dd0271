"""One iteration of a root module: the passes under way, prefetching, reductions in flight, recovery."""
