"""What a run learns: losses, metrics, optimizers, and how a user's own are tried."""
