"""Reports of a run: summaries, tables, traces and pages."""
