"""Figures as HTML with inline SVG, and how they look."""
