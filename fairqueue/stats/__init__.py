"""Statistics of a queue: users and their shares, the overview, samples for charts."""
