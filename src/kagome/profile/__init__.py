"""What a model costs by row and edge, measured here."""
