"""The gateway's settings: which model, where to listen, and its limits."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from dilaserve.settings import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, CommonSettings


class GatewaySettings(CommonSettings, frozen=True, kw_only=True):
    """Read from DILASERVE_* variables, once, in `__main__`."""

    model: Annotated[str, "folder of the model: config.json and the tokenizer's files"]
    model_name: Annotated[str, "id of the model in the API; empty: the folder's name"] = ""
    block_length: Annotated[int, "tokens in a block", AT_LEAST_ONE] = 32
    host: Annotated[str, "address of the HTTP listener"] = "127.0.0.1"
    port: Annotated[int, "port of the HTTP listener; 0 takes a free one", Meta(ge=0, le=65535)] = (
        8000
    )
    start_timeout_s: Annotated[
        float, "how long to wait for NATS and Redis at the start", NOT_NEGATIVE
    ] = 30.0
    stop_timeout_s: Annotated[float, "how long a stop waits for open connections", NOT_NEGATIVE] = (
        3.0
    )
    admission_timeout_s: Annotated[
        float, "how long to try to have a request admitted", POSITIVE
    ] = 15.0
    silence_s: Annotated[
        float, "a request silent for this long is read from the store", POSITIVE
    ] = 0.5
    keepalive_s: Annotated[float, "time between comments on a silent event stream", POSITIVE] = 15.0
    max_body_bytes: Annotated[int, "largest request body", AT_LEAST_ONE] = 4 * 1024 * 1024
    max_choices: Annotated[int, "most choices (prompts × n) of one call", AT_LEAST_ONE] = 64
    max_store_share: Annotated[
        float, "share of the store's memory above which to refuse", Meta(gt=0, le=1)
    ] = 0.9
    slo_ms: Annotated[
        int, "SLO of requests that bring none, in milliseconds (default tier)", AT_LEAST_ONE
    ] = 30000
    flex_slo_factor: Annotated[
        float, "SLO of the service tier flex, in multiples of the default", POSITIVE
    ] = 4.0
    flex_priority: Annotated[int, "priority of the service tier flex"] = -10
    priority_slo_factor: Annotated[
        float, "SLO of the service tier priority, in multiples of the default", POSITIVE
    ] = 0.5
    priority_priority: Annotated[int, "priority of the service tier priority"] = 10
