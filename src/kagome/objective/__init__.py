"""What a run learns: losses, metrics and optimizers, and how a user's own are tried."""
