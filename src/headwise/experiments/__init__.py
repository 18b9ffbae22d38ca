"""What an experiment is: task, recipe, phases, arms and study, before anything runs."""
