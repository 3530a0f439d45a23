"""What each tensor holds: rows of vertices or edges, along which axis, and how many."""
