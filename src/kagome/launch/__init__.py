"""How ranks start and end: processes, threads, host memory, signals of the system."""
