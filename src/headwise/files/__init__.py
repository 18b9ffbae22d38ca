"""Durable files, provenance, optional imports, entry points and files of tensors."""
