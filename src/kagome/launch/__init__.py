"""Start and end of ranks: processes, threads, host memory and signals of the system."""
