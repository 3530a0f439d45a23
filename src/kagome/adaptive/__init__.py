"""How exactly each epoch runs: compression, history, rollback, and what decides them."""
