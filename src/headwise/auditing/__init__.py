"""The third verb: the health of every head of a checkpoint on disk."""
