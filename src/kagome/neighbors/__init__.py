"""Who supplies the neighbours' rows."""
