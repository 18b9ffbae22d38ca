"""The league of the literature: files of its entries and worlds, and the tasks of the worlds."""
