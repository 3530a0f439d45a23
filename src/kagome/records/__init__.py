"""Records of a run: epochs, memory, plans, pipelines and spans."""
