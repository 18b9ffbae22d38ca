"""The third verb, audit: the health of every head of a checkpoint on disk."""
