"""The attention interface of transformers 5."""
