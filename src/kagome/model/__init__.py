"""What we compute: the ready models, and what a split must not change."""
