"""What a layer did the last time is done again without running its Python."""
