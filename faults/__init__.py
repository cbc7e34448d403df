"""The fault harness: breaks real processes on a real server, and checks the result."""
