"""Memory of a rank by kind: measured from its tensors, and estimated before a run."""
