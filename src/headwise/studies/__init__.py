"""The built-in study, and the list of those that installed packages bring."""
