"""Structure of one graph: edges, attributes, labels and splits."""
