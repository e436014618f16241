"""The planner's settings: what it plans with, how often, and what a change has to bring."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from dilaserve.errors import SettingsError
from dilaserve.messages import CacheMode
from dilaserve.profiles import load_profiles
from dilaserve.settings import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, CommonSettings
from dilaserve_reconfigurator.decision import Costs
from dilaserve_reconfigurator.paces import load_paces
from dilaserve_reconfigurator.planner import PlannerOptions

__all__ = ["ReconfiguratorSettings", "degrees_of"]


class ReconfiguratorSettings(CommonSettings, frozen=True, kw_only=True):
    """Read from DILASERVE_* variables, once, in `__main__`."""

    profile: Annotated[
        str, "latency profile of the served model (dilaserve profile); empty: keep the mix"
    ] = ""
    recorded_steps: Annotated[
        str, "recorded steps of the served model (dilaserve record); with a profile"
    ] = ""
    nodes: Annotated[str, "GPUs of the nodes, as in 4x8; hosts fill them in order of their names"]
    tp_degrees: Annotated[str, "TP degrees to choose from"] = "1,2,4"
    model_name: Annotated[str, "id of the model in the API; empty: plan for all instances"] = ""
    cache_mode: Annotated[CacheMode, "which keys and values the workers keep"] = "dual"
    block_length: Annotated[int, "tokens in a block", AT_LEAST_ONE] = 32
    max_batch_tokens: Annotated[int, "tokens of all requests of an instance", AT_LEAST_ONE] = 8192
    overhead: Annotated[float, "factor on the profile for what is lost beside a pass", POSITIVE] = (
        1.0
    )
    slo_ms: Annotated[int, "SLO of requests that bring none, in milliseconds", AT_LEAST_ONE] = 30000
    plan_every_s: Annotated[float, "seconds from one plan to the next", POSITIVE] = 300.0
    plan_window_s: Annotated[float, "seconds of arrivals that a plan looks at", POSITIVE] = 300.0
    plan_budget_s: Annotated[float, "longest time to make a plan", POSITIVE] = 20.0
    rate_factor: Annotated[float, "safety factor on the arrival rates", POSITIVE] = 1.5
    min_gain: Annotated[float, "what a change has to bring, as a share", NOT_NEGATIVE] = 0.1
    launch_s: Annotated[float, "what launching an instance takes", NOT_NEGATIVE] = 60.0
    solver: Annotated[Literal["highs", "gurobi"], "Gurobi only where its licence allows"] = "highs"
    plans_dir: Annotated[str, "folder of the plans made, for `dilaserve plan explain`"] = (
        ".dilaserve/plans"
    )
    planner_mode: Annotated[
        Literal["advise", "apply"], "apply also launches and ends the workers"
    ] = "advise"
    launcher: Annotated[
        Literal["process", "docker"], "workers are processes of this machine, or containers"
    ] = "process"
    initial_mix: Annotated[
        str, "workers to begin with when applying, as in 8xtp1; empty: the smallest degree alone"
    ] = ""
    worker_device: Annotated[
        Literal["cuda", "cpu"], "what workers run on that are launched: GPUs, or CPU cores"
    ] = "cuda"
    worker_environ: Annotated[
        str, "more variables of the workers, as in OMP_NUM_THREADS=2 NCCL_DEBUG=INFO"
    ] = ""
    instances_dir: Annotated[str, "folder of what was launched, and of the mix that is wanted"] = (
        ".dilaserve/instances"
    )
    docker_hosts: Annotated[
        str, "a Docker engine for each node, as in a=unix:///var/run/docker.sock,b=tcp://b:2376"
    ] = ""
    docker_certs: Annotated[
        str, "folder of ca.pem, cert.pem and key.pem for engines on tcp://; empty: no TLS"
    ] = ""
    docker_image: Annotated[str, "image of the workers"] = "dilaserve/gpu-worker:latest"
    docker_network: Annotated[str, "Docker network of the workers; empty: the engine's own"] = ""
    docker_volumes: Annotated[
        str, "what workers see of their host, as in /models/llada:/model:ro; several by commas"
    ] = ""
    docker_labels: Annotated[str, "more labels of the containers, as in a=b,c=d"] = ""
    docker_cluster: Annotated[
        str, "tells this cluster's containers from those of others on the same engines"
    ] = "dilaserve"
    drain_timeout_s: Annotated[
        float,
        "how long an instance may take to get empty; then it is ended",
        POSITIVE,
    ] = 60.0
    capacity_floor: Annotated[
        int, "GPUs that serve at any time of a plan, where the nodes have room for it", NOT_NEGATIVE
    ] = 0
    launch_timeout_s: Annotated[
        float, "how long a worker may take from its launch until it serves", POSITIVE
    ] = 300.0
    silent_timeout_s: Annotated[
        float,
        "how long a worker may be silent, while others are heard, until it is ended and replaced; "
        "0: for ever",
        NOT_NEGATIVE,
    ] = 30.0
    start_timeout_s: Annotated[float, "how long to wait for NATS at the start", NOT_NEGATIVE] = 30.0

    def options(self) -> PlannerOptions | None:
        """What the planner takes of them; None where it is to keep the mix. Raises DiLaServeError
        for files that cannot be used."""
        if not self.profile and not self.recorded_steps and self.planner_mode == "apply":
            return None
        if not self.profile or not self.recorded_steps:
            raise SettingsError(
                f"DILASERVE_PROFILE={self.profile!r}, DILASERVE_RECORDED_STEPS="
                f"{self.recorded_steps!r}: plans need both; with DILASERVE_PLANNER_MODE=apply, "
                "neither keeps the mix as it is"
            )
        return PlannerOptions(
            profiles=load_profiles(Path(self.profile)),
            paces=load_paces(Path(self.recorded_steps)),
            degrees=degrees_of(self.tp_degrees),
            block_length=self.block_length,
            cache_mode=self.cache_mode,
            max_batch_tokens=self.max_batch_tokens,
            overhead=self.overhead,
            rate_factor=self.rate_factor,
            budget_s=self.plan_budget_s,
            solver=self.solver,
            costs=Costs(launch_s=self.launch_s, min_gain=self.min_gain),
        )

    def check_floor(self, n_gpus: int) -> None:
        """Raises SettingsError for a floor that not even all GPUs reach."""
        if self.capacity_floor > n_gpus:
            raise SettingsError(
                f"DILASERVE_CAPACITY_FLOOR={self.capacity_floor}: DILASERVE_NODES={self.nodes!r} "
                f"are {n_gpus} GPUs in all; give no more than that"
            )


def degrees_of(text: str) -> tuple[int, ...]:
    """`1,2,4`, ascending; each divides the next. Raises SettingsError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 7 and int(part) > 0 for part in parts):
        raise SettingsError(f"TP degrees {text!r} are not numbers; write them for example 1,2,4")
    degrees = tuple(sorted({int(part) for part in parts}))
    if any(larger % smaller for smaller, larger in pairwise(degrees)):
        raise SettingsError(f"TP degrees {text!r} do not divide one another; use for example 1,2,4")
    return degrees
