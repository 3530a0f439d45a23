"""Files that are written whole, and that say whether they are as they were written."""
