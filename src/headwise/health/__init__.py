"""Health of attention heads: statistics, watching a training, auditing a checkpoint."""
