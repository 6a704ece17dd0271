"""Where bytes lie, as numbers, and the copies that put them there: no process groups, no modules."""
