"""What the log says of the latency profile: which one it is, and whose passes it does not tell.

Knows no policy and no bus.
"""

from __future__ import annotations

from collections.abc import Iterator

from dilaserve.messages import InstanceInfo
from dilaserve.pass_curves import PassCurves
from dilaserve.profiles import ProfileSet

__all__ = ["ProfileNotes", "summary"]


def summary(profiles: ProfileSet, path: str) -> str:
    """One line: file, model, device, TP degrees, and whether step kinds are told apart. Raises
    ProfileError for points that cannot be used."""
    degrees = ", ".join(map(str, profiles.tp_degrees))
    tell = [PassCurves(each).tells_kinds for each in profiles.profiles]
    kinds = "step kinds told apart" if all(tell) else "step kinds not told apart"
    if any(tell) and not all(tell):
        kinds = "step kinds told apart for some of them only"
    return (
        f"latency profile {path}: {profiles.model} on {profiles.device}, TP degrees {degrees}, "
        f"{kinds}"
    )


class ProfileNotes:
    """Says each thing once, however often an instance is heard."""

    def __init__(self, profiles: ProfileSet | None) -> None:
        self._profiles = profiles
        self._said: set[str | int] = set()

    def heard(self, info: InstanceInfo) -> Iterator[str]:
        """Warnings: the instance serves another model than the one that was measured, or has a TP
        degree that was not."""
        profiles = self._profiles
        if profiles is None:
            return
        if info.model_id != profiles.model and self._is_new(info.model_id):
            yield (
                f"instance {info.instance_id} serves {info.model_id!r}, and the latency profile is "
                f"of {profiles.model!r}: deadlines are planned with its figures all the same; "
                "measure this one with `dilaserve profile` (--model-name tells it another name), "
                "or unset DILASERVE_PROFILE, and latencies are learned"
            )
        if info.tp_degree not in profiles.tp_degrees and self._is_new(info.tp_degree):
            yield (
                f"instance {info.instance_id} has TP degree {info.tp_degree}, which the latency "
                f"profile has not: its latencies are learned; measure it with `dilaserve profile "
                f"--tp {info.tp_degree}`"
            )

    def _is_new(self, what: str | int) -> bool:
        is_new = what not in self._said
        self._said.add(what)
        return is_new
