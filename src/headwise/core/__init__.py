"""The words that methods are written in: method, call, site, state, schedules, draws, recompute."""
