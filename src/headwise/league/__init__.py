"""league: methods and controls in several worlds, each searched alike, and what they do over all of them."""
