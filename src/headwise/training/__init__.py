"""One run: what it trains, on which examples, from which checkpoint."""
