"""Durable files, provenance, downloads, optional imports and the errors of the file system."""
