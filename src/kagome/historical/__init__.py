"""Historical embeddings for chunks: rows of other chunks as last known, or exact, all chunks at once."""
