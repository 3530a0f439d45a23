"""File storage: atomic writes, and files with checksums that show whether they were altered."""
