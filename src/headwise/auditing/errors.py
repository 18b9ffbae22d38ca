"""What can be wrong with a checkpoint, said so that a user can act on it."""


class CheckpointError(ValueError):
    """Raised where a checkpoint is corrupt, truncated, pickled, unknown or does not fit; the text names the file and
    the remedy."""
