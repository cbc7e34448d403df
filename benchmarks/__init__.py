"""Speed, memory, fairness and lateness, each as a ratio to what Redis itself does in the same run."""
