"""The built-in studies, one file each; `headwise compare` finds them by their file names."""
