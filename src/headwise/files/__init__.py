"""Durable files, provenance, optional imports, entry points, signals and errors."""
