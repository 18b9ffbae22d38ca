"""Self-contained HTML pages: their shell, charts and number formats."""
