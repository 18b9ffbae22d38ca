"""The league: methods and controls, tuned equally in several worlds and compared over all of them."""
