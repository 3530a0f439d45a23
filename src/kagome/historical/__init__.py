"""Historical embeddings for chunks: rows of other chunks as last known, or all chunks run in lockstep."""
