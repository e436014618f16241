"""Who is on the bus: every service answers `$SRV.INFO` of the NATS micro API."""

from __future__ import annotations

import msgspec

from dilaserve.bus import Bus

__all__ = ["ServiceInfo", "discover"]


class ServiceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What one service process says of itself; `metadata` holds id, pid, address and host."""

    name: str
    id: str
    version: str
    description: str = ""
    metadata: dict[str, str] = {}

    @property
    def pid(self) -> int | None:
        """Process id on its host; None if the service did not say."""
        text = self.metadata.get("pid", "")
        return int(text) if text.isdecimal() else None


_decode = msgspec.json.Decoder(ServiceInfo).decode


async def discover(bus: Bus, service: str = "", *, wait_s: float = 0.3) -> list[ServiceInfo]:
    """All processes of `service` (empty: of every service) that answer within `wait_s`."""
    subject = f"$SRV.INFO.{service}" if service else "$SRV.INFO"
    answers = await bus.request_many(subject, b"", wait_s=wait_s)
    found = [_decode(answer.data) for answer in answers]
    return sorted(found, key=lambda info: (info.name, info.metadata.get("id", info.id)))
