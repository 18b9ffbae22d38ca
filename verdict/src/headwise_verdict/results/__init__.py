"""The results of runs and the verdicts drawn from them."""
