"""The types that methods are written with: method, call, site, state, schedules, random draws, recompute."""
