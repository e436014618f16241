"""Who runs, and on which GPUs."""

from __future__ import annotations

from dilaserve.messages import InstanceInfo
from dilaserve_reconfigurator.members import Members
from dilaserve_reconfigurator.monitor import Missing
from dilaserve_reconfigurator.planner import Cluster
from dilaserve_reconfigurator.stage2 import Placed, Slot


def info(
    instance_id: str, tp_degree: int = 1, *, host: str = "a", model_id: str = "m"
) -> InstanceInfo:
    return InstanceInfo(
        instance_id=instance_id,
        name=instance_id,
        model_id=model_id,
        weights_hash="",
        tp_degree=tp_degree,
        cache_mode="dual",
        block_length=32,
        max_batch_tokens=8192,
        n_kv_tokens=0,
        max_sequence_length=4096,
        host=host,
        pid=1,
    )


def test_hosts_fill_nodes_and_instances_their_gpus_the_largest_first() -> None:
    members = Members((4, 2))
    for each in (info("w1"), info("w2", 2), info("w3", 2, host="b")):
        members.heard(0.0, each)
    cluster = members.cluster(1.0)
    assert isinstance(cluster, Cluster)
    assert cluster.running == (
        Placed("w2", Slot(0, (0, 1))),
        Placed("w1", Slot(0, (2,))),
        Placed("w3", Slot(1, (0, 1))),
    )
    assert cluster.counts((1, 2, 4)) == {1: 1, 2: 2, 4: 0}


def test_silent_and_departed_instances_do_not_count() -> None:
    members = Members((4,))
    members.heard(0.0, info("silent"))
    members.heard(2.0, info("gone"))
    members.heard(2.0, info("here"))
    members.left("gone")
    cluster = members.cluster(2.5)
    assert isinstance(cluster, Cluster)
    assert [placed.instance_id for placed in cluster.running] == ["here"]


def test_other_models_do_not_count() -> None:
    members = Members((4,), "m")
    members.heard(0.0, info("other", model_id="n"))
    assert members.cluster(0.0) == Cluster((4,), ())


def test_more_than_the_nodes_have_is_no_cluster() -> None:
    members = Members((2,))
    members.heard(0.0, info("w1", 4))
    assert members.cluster(0.0) == Missing("host a runs 4 GPUs' worth, has 2 GPUs")
    members.heard(0.0, info("w2", host="b"))
    assert members.cluster(0.0) == Missing("2 hosts run instances, on 1 nodes known")


def test_degree_beyond_any_machine_takes_no_memory() -> None:
    members = Members((2,))
    members.heard(0.0, info("w1", 2**40))
    assert isinstance(members.cluster(0.0), Missing)
