"""Pages that open offline."""
