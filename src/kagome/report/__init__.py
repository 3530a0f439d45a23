"""Say what happened: meters, timeline, page."""
