"""The built-in study, the registry of installed studies, and studies from Python."""
