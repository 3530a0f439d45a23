"""Decoupled models: all maps of rows first, then all propagation along edges."""
