"""The league: methods and controls in small worlds, tuned by one search; what carries over from world to world."""
