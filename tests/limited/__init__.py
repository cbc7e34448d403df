"""The suite as a user of Redis with few rights."""
