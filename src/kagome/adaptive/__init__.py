"""How exactly each epoch runs: compression, history, rollback, and the controllers that decide on them."""
