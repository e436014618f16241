"""The gateway's settings: which model, where to listen, and its limits."""

from __future__ import annotations

from typing import Annotated

from dilaserve.settings import CommonSettings


class GatewaySettings(CommonSettings, frozen=True, kw_only=True):
    """Read from DILASERVE_* variables, once, in `__main__`."""

    model: Annotated[str, "folder of the model: config.json and the tokenizer's files"]
    model_name: Annotated[str, "id of the model in the API; empty: the folder's name"] = ""
    block_length: Annotated[int, "tokens in a block"] = 32
    host: Annotated[str, "address of the HTTP listener"] = "127.0.0.1"
    port: Annotated[int, "port of the HTTP listener; 0 takes a free one"] = 8000
    start_timeout_s: Annotated[float, "how long to wait for NATS and Redis at the start"] = 30.0
    stop_timeout_s: Annotated[float, "how long a stop waits for open connections"] = 3.0
    admission_timeout_s: Annotated[float, "how long to try to have a request admitted"] = 15.0
    silence_s: Annotated[float, "a request silent for this long is read from the store"] = 0.5
    keepalive_s: Annotated[float, "time between comments on a silent event stream"] = 15.0
    max_body_bytes: Annotated[int, "largest request body"] = 4 * 1024 * 1024
    max_choices: Annotated[int, "most choices (prompts × n) of one call"] = 64
    max_store_share: Annotated[float, "share of the store's memory above which to refuse"] = 0.9
