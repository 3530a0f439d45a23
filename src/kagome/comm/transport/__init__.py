"""How bytes go over and come in: process groups, shared memory, deadlines, failures."""
