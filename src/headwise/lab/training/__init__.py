"""One run: its training loop, evaluations, checkpoints and result."""
