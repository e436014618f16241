"""Policies by name. Each is one module that implements `core.policy.Policy`."""

from __future__ import annotations

from collections.abc import Callable

from dilaserve.errors import SettingsError
from dilaserve_scheduler.core.policy import Policy
from dilaserve_scheduler.policies.dilaserve import Dilaserve
from dilaserve_scheduler.policies.infaas import Infaas
from dilaserve_scheduler.policies.llumnix import Llumnix
from dilaserve_scheduler.policies.options import PolicyOptions
from dilaserve_scheduler.policies.per_model import PerModel
from dilaserve_scheduler.policies.proteus import Proteus
from dilaserve_scheduler.policies.tediserve import Tediserve

__all__ = ["POLICIES", "PolicyOptions", "build_policy"]

POLICIES: dict[str, Callable[[PolicyOptions], Policy]] = {
    "dilaserve": Dilaserve,
    "infaas": Infaas,
    "llumnix": Llumnix,
    "proteus": Proteus,
    "tediserve": Tediserve,
}


def build_policy(name: str, options: PolicyOptions) -> Policy:
    """A fresh policy object, with everything apart by model. Raises SettingsError for an unknown
    name."""
    if name not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        raise SettingsError(f"DILASERVE_POLICY={name!r} is no policy; use one of {known}")
    return PerModel(lambda: POLICIES[name](options))
