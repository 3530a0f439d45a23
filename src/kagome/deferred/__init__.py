"""Messages along edges that are kept as expressions until a kernel reduces them."""
