"""Run directory: the files of a run, the claim on its folder, and its results."""
