"""Report pages: HTML files that open offline."""
