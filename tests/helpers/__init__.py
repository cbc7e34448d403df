"""Shared by the tests: makers, readers of the stored state, networks, clients, a browser."""
