"""Ops whose layers keep a state of fixed size for each sequence, in place of an entry for each token."""
