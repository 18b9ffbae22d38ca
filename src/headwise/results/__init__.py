"""From the results of runs to verdicts."""
