"""Names of the keys in Redis, and the shard of a request.

Ids are spread over a fixed number of shards; the keys of one shard share a hash tag, hence a slot
of a cluster, and one function may touch them all.
"""

from __future__ import annotations

import zlib

N_SHARDS = 16
"""Fixed for good: another number would look for stored requests in the wrong shard."""

LEASE = "dlm:{lease}:holder"
LEASE_TERM = "dlm:{lease}:term"


def shard_of(request_id: str) -> int:
    """The shard of a request, from 0; the same in every process."""
    return zlib.crc32(request_id.encode()) % N_SHARDS


def record(request_id: str) -> str:
    """Hash with everything known of a request."""
    return f"dlm:{_tag(shard_of(request_id))}:req:{request_id}"


def stream(request_id: str) -> str:
    """Stream with one entry per committed step."""
    return f"dlm:{_tag(shard_of(request_id))}:steps:{request_id}"


def active(shard: int) -> str:
    """Set of the ids of a shard's active requests."""
    return f"dlm:{_tag(shard)}:active"


def term(shard: int) -> str:
    """Highest scheduler term that a shard has seen."""
    return f"dlm:{_tag(shard)}:term"


def _tag(shard: int) -> str:
    return f"{{s{shard:02d}}}"
