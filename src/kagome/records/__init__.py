"""Records of a run: epochs, memory, pipelines and spans."""
