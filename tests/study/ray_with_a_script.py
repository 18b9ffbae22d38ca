"""Carry out a script's study on a Ray cluster of this machine: `python ray_with_a_script.py OUT`.

Its own process, because Ray leaves threads and warnings behind.
"""

import sys
from pathlib import Path

from test_script import carry_script

from headwise.lab.engines.ray_cluster import RayEngine

engine = RayEngine(None)
try:
    carry_script(Path(sys.argv[1]), engine=engine)
finally:
    engine.close()
