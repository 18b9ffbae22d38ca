"""The first verb: fit methods onto a model, train with them, and take them off."""
