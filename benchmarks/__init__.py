"""Speed, memory, fairness and lateness, relative to the speed of Redis itself in the same run."""
