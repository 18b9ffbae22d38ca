"""What a script's run tells, stops, and data sets."""
