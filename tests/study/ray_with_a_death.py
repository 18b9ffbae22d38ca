"""Carry out a study on a Ray cluster of two nodes on this machine and kill a node, or a worker process, in the middle
of a run.

Usage: python ray_with_a_death.py OUT node|worker; prints how many were killed, how many runs ended and what was said.
Its own process, because Ray leaves threads and warnings behind.
"""

import sys
from pathlib import Path

import psutil
from ray.cluster_utils import Cluster
from small_studies import Silent, carry, tiny_study

from headwise.lab.engines.ray_cluster import RayEngine


class Kill(Silent):
    """Kill in the middle of a run: with more runs than nodes, each node works."""

    killed = 0

    def hear(self, order, event):
        super().hear(order, event)
        if event["event"] == "progress" and not self.killed and 2 <= event["epoch"] < event["epochs"]:
            if sys.argv[2] == "node":
                cluster.remove_node(nodes[0], allow_graceful=False)
            else:
                workers()[0].kill()
            self.killed += 1


def workers():
    """Return the processes that carry out runs."""
    family = psutil.Process().children(recursive=True)
    return [process for process in family if "carry_out_remotely" in " ".join(process.cmdline())]


cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
cluster.wait_for_nodes()
listener = Kill()
engine = RayEngine(cluster.address)
try:
    carry(tiny_study("Slow", methods=("DropHead(p=0.3)",), seeds=2, pause=0.1), Path(sys.argv[1]), engine, listener)
finally:
    engine.close()
    cluster.shutdown()
print("\n".join(listener.said))
print(f"killed {listener.killed}, ended {len(listener.ends)}")
