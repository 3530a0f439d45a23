"""Transport of bytes between ranks: process groups, shared memory, time limits and failures."""
