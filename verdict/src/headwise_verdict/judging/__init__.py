"""Judging one change: evidence that may be looked at after every seed, and the decision that follows from it."""
