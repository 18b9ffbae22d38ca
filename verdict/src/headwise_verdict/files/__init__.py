"""Durable files, ownership, text of strangers, and errors: what the other rooms stand on."""
