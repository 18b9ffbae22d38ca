"""Carry out a study on a Ray cluster of two nodes on this machine and kill one in the middle of its run.

Usage: python ray_with_a_killed_node.py OUT; prints how many nodes were killed and how many runs ended. Its own process, because Ray leaves
threads and warnings behind.
"""

import sys
from pathlib import Path

from ray.cluster_utils import Cluster
from small_studies import Silent, carry, tiny_study

from headwise.engines.ray_cluster import RayEngine


class KillANode(Silent):
    """Remove a node in the middle of its run: with more runs than nodes, each node works."""

    killed = 0

    def hear(self, order, event):
        super().hear(order, event)
        if event["event"] == "progress" and not self.killed and 2 <= event["epoch"] < event["epochs"]:
            cluster.remove_node(nodes[0], allow_graceful=False)
            self.killed += 1


cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
cluster.wait_for_nodes()
listener = KillANode()
engine = RayEngine(cluster.address)
try:
    carry(tiny_study("Slow", methods=("DropHead(p=0.3)",), seeds=2, pause=0.1), Path(sys.argv[1]), engine, listener)
finally:
    engine.close()
    cluster.shutdown()
print(f"killed {listener.killed}, ended {len(listener.ends)}")
