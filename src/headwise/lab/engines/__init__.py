"""Engines that carry out the runs: an engine takes orders and yields events; it never changes a number.

An event is a dict with "event" (note, output, progress, done, failed) and "run", the identity of its run.
"""
