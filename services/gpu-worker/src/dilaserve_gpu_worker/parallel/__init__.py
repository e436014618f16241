"""Tensor parallelism: one process per rank, each with its slice of the model (DESIGN section 6).

Rank 0 is the engine's process and decides everything. The other ranks, its children, compute the
batches that it sends them; what it decided comes to them as the tokens of the next batch.
"""

from dilaserve_gpu_worker.parallel.group import GroupPeers
from dilaserve_gpu_worker.parallel.ranks import Ranks, launch_ranks

__all__ = ["GroupPeers", "Ranks", "launch_ranks"]
