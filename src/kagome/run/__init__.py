"""Do it: one rank's work, epochs, checkpoints."""
