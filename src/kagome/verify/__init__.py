"""A model split against the same model whole."""
