"""Attention over the tokens that an indexer chooses: indexer, selection, sparse latent attention, the block."""
