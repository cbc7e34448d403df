"""The fault harness: real processes on a real server, broken in every way, and what is left."""
