"""The worker's settings: which model, in which form, and how it serves."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from dilaserve.errors import SettingsError
from dilaserve.messages import CacheMode
from dilaserve.settings import AT_LEAST_ONE, MOST_THREADS, NOT_NEGATIVE, CommonSettings
from dilaserve_gpu_worker.engine.plan_policy import PLAN_TOKENS, PlanPolicyName
from dilaserve_gpu_worker.options import MOST_TOKENS

TOKENS = Meta(ge=1, le=MOST_TOKENS)


class WorkerSettings(CommonSettings, frozen=True, kw_only=True):
    """Read from DILASERVE_* variables, once, in `__main__`."""

    model: Annotated[str, "folder of the model: config.json and *.safetensors"]
    model_name: Annotated[str, "id of the model in the API; empty: the folder's name"] = ""
    worker_name: Annotated[
        str,
        "name of the instance that survives a restart of its process; empty: the host's name",
        Meta(pattern=r"^[A-Za-z0-9_-]{0,200}\Z"),  # one word of a subject
    ] = ""
    block_length: Annotated[int, "tokens in a block", TOKENS] = 32
    cache_mode: Annotated[CacheMode, "none, prefix or dual"] = "dual"
    device: Annotated[str, "auto, cpu, cuda or cuda:N"] = "auto"
    tp_degree: Annotated[
        int, "tensor parallelism: processes, and GPUs, that share one model", AT_LEAST_ONE
    ] = 1
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], "type of weights"] = "auto"
    attention: Annotated[
        Literal["auto", "sdpa", "torch_varlen", "torch_paged", "flash_attn"],
        "attention backend; auto: on a GPU in 16 bits the first of flash_attn, torch_paged and "
        "torch_varlen that works there, else sdpa",
    ] = "auto"
    cuda_graphs: Annotated[
        Literal["auto", "on", "off"],
        "replay passes made of cache steps alone as CUDA graphs; auto: on one GPU, where the "
        "attention backend can be captured",
    ] = "auto"
    compile: Annotated[
        Literal["off", "on"], "have torch compile the model's blocks, at the first passes"
    ] = "off"
    pack_weights: Annotated[
        Literal["auto", "off"],
        "pack matrices once for oneDNN; auto: in float32 on a CPU where products are faster so, "
        "and never with compile",
    ] = "auto"
    max_batch_tokens: Annotated[int, "most tokens computed in one forward pass", TOKENS] = 8192
    plan_policy: Annotated[
        PlanPolicyName,
        "which rows make up a pass. blockserve: all that fit; sangam: recomputes only as far as a "
        "deficit budget goes; static: a baseline, the next batch waits for the slowest of this one",
    ] = "blockserve"
    plan_tokens: Annotated[int, "plan policy sangam: tokens of a pass on average", TOKENS] = (
        PLAN_TOKENS
    )
    kv_tokens: Annotated[
        int, "size of the KV pool in tokens; 0: sized from free memory", Meta(ge=0, le=2**40)
    ] = 0
    threads: Annotated[int, "torch threads of one process", Meta(ge=1, le=MOST_THREADS)] = 1
    cpu_affinity: Annotated[str, "cores that the engine runs on, such as 0 or 0,1; empty: any"] = ""
    heartbeat_ms: Annotated[int, "time between two heartbeats", Meta(ge=1, le=3_600_000)] = 250
    start_timeout_s: Annotated[
        float, "how long to wait for NATS and Redis at the start", NOT_NEGATIVE
    ] = 30.0
    stop_timeout_s: Annotated[
        float, "how long a stop waits for the pass under way and for the store", NOT_NEGATIVE
    ] = 5.0

    def __post_init__(self) -> None:
        """Raises SettingsError for an instance that could serve no request."""
        if self.max_batch_tokens <= self.block_length:
            raise SettingsError(
                f"DILASERVE_MAX_BATCH_TOKENS={self.max_batch_tokens} is no room for a prompt and a "
                f"block of {self.block_length} tokens (DILASERVE_BLOCK_LENGTH), so no request "
                "would fit into a pass; use for example 8192, and shorter blocks"
            )
