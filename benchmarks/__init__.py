"""Speed, memory, fairness and lateness, as ratios to what Redis itself does in the same run."""
