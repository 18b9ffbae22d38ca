"""Compare methods on a task: fair by construction, resumable, repeatable."""
