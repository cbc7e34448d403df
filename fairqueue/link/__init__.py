"""The way to Redis: URLs, connections, keys, scripts, deadlines and permissions."""
