"""One self-contained HTML page: its shell, its charts and its formats."""
