"""Exact operations: statistics, random draws and global attention that do not depend on the split."""
