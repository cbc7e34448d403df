"""What programs run on: the embedded server, groups of processes, threads, signals."""
