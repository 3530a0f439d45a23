"""Charts as HTML with inline SVG, and their style."""
