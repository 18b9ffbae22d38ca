"""Arms: what is compared. Their text is label, key and command-line argument at once."""
