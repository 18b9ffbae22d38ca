"""Engines: who carries out the runs. An engine takes orders and gives events; it never changes a number.

An event is a dict with "event" (note, output, progress, done, failed) and "run", the identity of the run it is about.
"""
