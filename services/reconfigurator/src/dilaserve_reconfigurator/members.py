"""The running instances as the planner needs them: which there are, and which GPUs they take.

Sans-IO. Instances do not say which GPUs they have, so hosts fill the nodes in order of their
names, and instances a node's GPUs in order of their ids, the largest first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from dilaserve.messages import InstanceInfo
from dilaserve_reconfigurator.monitor import Missing
from dilaserve_reconfigurator.planner import Cluster
from dilaserve_reconfigurator.stage2 import Placed, Slot

__all__ = ["DEAD_AFTER_S", "Members"]

DEAD_AFTER_S = 2.0
"""Without a heartbeat."""


class Members:
    """Instances by id, as long as they are heard. `model_id` empty: of any model."""

    def __init__(self, nodes: Sequence[int], model_id: str = "") -> None:
        self._nodes = tuple(nodes)
        self._model_id = model_id
        self._heard: dict[str, tuple[float, InstanceInfo]] = {}

    def heard(self, now: float, info: InstanceInfo) -> None:
        """It joined, or is alive."""
        if not self._model_id or info.model_id == self._model_id:
            self._heard[info.instance_id] = (now, info)

    def left(self, instance_id: str) -> None:
        """It said goodbye."""
        self._heard.pop(instance_id, None)

    def id_of(self, now: float, name: str) -> str | None:
        """The instance id of a worker that is alive."""
        for at_s, info in self._heard.values():
            if info.name == name and now - at_s < DEAD_AFTER_S:
                return info.instance_id
        return None

    def cluster(self, now: float) -> Cluster | Missing:
        """Who is alive, and where; or why that makes no cluster."""
        self._heard = {
            key: (at_s, info)
            for key, (at_s, info) in self._heard.items()
            if now - at_s < DEAD_AFTER_S
        }
        by_host: dict[str, list[InstanceInfo]] = defaultdict(list)
        for _, info in self._heard.values():
            by_host[info.host].append(info)
        if len(by_host) > len(self._nodes):
            return Missing(f"{len(by_host)} hosts run instances, on {len(self._nodes)} nodes known")
        running = []
        for node, (host, infos) in enumerate(sorted(by_host.items())):
            taken, n_gpus = sum(info.tp_degree for info in infos), self._nodes[node]
            if taken > n_gpus:
                return Missing(f"host {host} runs {taken} GPUs' worth, has {n_gpus} GPUs")
            taken = 0
            for info in sorted(infos, key=lambda info: (-info.tp_degree, info.instance_id)):
                gpus = tuple(range(taken, taken + info.tp_degree))
                taken += info.tp_degree
                running.append(Placed(info.instance_id, Slot(node, gpus)))
        return Cluster(self._nodes, tuple(running))
