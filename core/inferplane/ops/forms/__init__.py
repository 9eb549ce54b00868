"""Less common forms of layers, norms, MLPs, rotations and embeddings."""
