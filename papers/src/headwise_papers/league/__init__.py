"""The league of the literature: its entries and worlds as files, and the tasks of the worlds with every control as a
setting."""
