"""The work of one rank in training: its data, its engine and its epochs."""
