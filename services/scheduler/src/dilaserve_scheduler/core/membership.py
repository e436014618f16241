"""Which instances there are: heartbeats, silence, restarts under the same name.

Knows nothing of requests or policies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from dilaserve.messages import InstanceInfo
from dilaserve_scheduler.core.model import Instance

__all__ = ["Heard", "Members"]

N_REMEMBERED = 4096
"""Departed instance ids kept, so that a late message does not bring one back."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What a sign of life changed."""

    instance: Instance
    joined: bool
    """It was not live before."""
    replaced: tuple[Instance, ...] = ()
    """Earlier incarnations of the same name: dead from now on."""


@dataclass(slots=True)
class _Departure:
    on_purpose: bool
    at: float
    named: bool = False


@dataclass(frozen=True, slots=True)
class _Promise:
    until: float
    largest: int


class Members:
    """Instances by id.

    Silence proves a death only while others are heard: when nobody is (the bus is down, or the
    scheduler itself stood still), there is neither evidence nor anywhere to go. So silence is
    measured on a clock that advances with the messages of instances, by at most `gap_s` each.
    """

    def __init__(self, *, dead_after_s: float, gap_s: float) -> None:
        self._dead_after_s = dead_after_s
        self._gap_s = gap_s
        self._instances: dict[str, Instance] = {}
        self._by_silence: OrderedDict[str, Instance] = OrderedDict()
        self._by_name: dict[str, dict[str, Instance]] = {}
        self._departed: OrderedDict[str, _Departure] = OrderedDict()
        self._mark = 0.0
        self._heard_at = 0.0
        self._n_joined = 0
        self._largest: dict[str, int] = {}
        self._promised: dict[str, _Promise] = {}
        self.n_live = 0

    @property
    def heard_at(self) -> float:
        """When anybody was last heard; 0 before."""
        return self._heard_at

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._instances.values())

    def get(self, instance_id: str) -> Instance | None:
        """The instance, whatever its state."""
        return self._instances.get(instance_id)

    def has_departed(self, instance_id: str) -> bool:
        """Whether it was replaced, or left on purpose: nothing that it says counts any more."""
        return instance_id in self._departed

    def left_on_purpose(self, instance_id: str) -> bool:
        """Whether it said that it leaves."""
        departure = self._departed.get(instance_id)
        return departure is not None and departure.on_purpose

    def shares_name(self, now: float, instance_id: str) -> bool:
        """Whether an instance that was replaced is still heard, so that two must have the same
        name. True once for each."""
        departure = self._departed.get(instance_id)
        if departure is None or departure.on_purpose or departure.named:
            return False
        departure.named = now - departure.at >= self._dead_after_s
        return departure.named

    def is_silent(self, instance: Instance, now: float) -> bool:
        """Whether it has not been heard for as long as a dead one, dead or not."""
        return now - instance.heard_at >= self._dead_after_s

    def is_served(self, model_id: str, now: float) -> bool:
        """Whether an instance of the model is live, as far as anything is heard at all, or will be
        soon."""
        promised = self._promised.get(model_id)
        if promised is not None and now < promised.until:
            return True
        return model_id in self._largest and now - self._heard_at < self._dead_after_s

    def largest(self, model_id: str) -> int:
        """Longest request (prompt + output) that a live instance of the model can run; while one
        is promised and none is live, what the last could."""
        largest = self._largest.get(model_id)
        if largest is None and model_id in self._promised:
            return self._promised[model_id].largest
        return largest or 0

    def limit(self, model_id: str) -> str:
        """In brackets, what makes `largest` no larger; empty where no instance is live."""
        largest = self.largest(model_id)
        limits = [i.limit for i in self if i.model_id == model_id and i.capacity == largest]
        return f" ({limits[0]})" if limits else ""

    def promise(self, model_id: str, until: float) -> None:
        """An instance of the model is being launched, in the place of one that leaves."""
        self._promised[model_id] = _Promise(until, self.largest(model_id))

    def forget_promises(self, now: float) -> None:
        """Those whose time is over."""
        self._promised = {m: p for m, p in self._promised.items() if now < p.until}

    def expect(self, instance_id: str) -> Instance:
        """The instance, known or not: a stored record names it."""
        instance = self._instances.get(instance_id)
        if instance is None:
            instance = self._add(instance_id, instance_id.rpartition("-")[0])
            instance.heard_mark = self._mark
            self._by_silence[instance_id] = instance
        return instance

    def hear(self, now: float, info: InstanceInfo) -> Heard | None:
        """An InstanceUp or a heartbeat. None if the instance has departed. One that was replaced
        comes back if it is heard and its successor is not: then the order of their first messages
        was misleading."""
        if info.instance_id in self._departed and not self._outlives(now, info):
            return None
        self._departed.pop(info.instance_id, None)
        instance = self._instances.get(info.instance_id) or self._add(info.instance_id, info.name)
        if instance.info != info:
            instance.learn(info)
        joined = instance.state != "live"
        if joined:
            instance.state = "live"
            self.n_live += 1
            self._largest[info.model_id] = max(self.largest(info.model_id), instance.capacity)
        self._touch(now, instance)
        return Heard(instance, joined, self._replaced_by(instance) if joined else ())

    def touch(self, now: float, instance_id: str) -> Instance | None:
        """Any other message of an instance: a sign of life of a live one."""
        instance = self._instances.get(instance_id)
        if instance is not None and instance.state == "live":
            self._touch(now, instance)
        return instance

    def depart(self, now: float, instance: Instance, *, on_purpose: bool) -> None:
        """It was replaced or leaves: what it still says does not count."""
        self._departed[instance.instance_id] = _Departure(on_purpose, now)
        if len(self._departed) > N_REMEMBERED:
            self._departed.popitem(last=False)
        self._die(instance)
        self._remove(instance)

    def take_dead(self) -> list[Instance]:
        """Instances that have just been silent for too long; they are dead until heard again."""
        dead = []
        while self._by_silence:
            instance = next(iter(self._by_silence.values()))
            if self._mark - instance.heard_mark < self._dead_after_s:
                break
            self._die(instance)
            dead.append(instance)
        return dead

    def forget_dead(self, now: float, after_s: float) -> None:
        """Drop dead instances not heard for `after_s`."""
        for instance in [i for i in self._instances.values() if i.state == "dead"]:
            if now - instance.heard_at >= after_s and not instance.requests:
                self._remove(instance)

    def _add(self, instance_id: str, name: str) -> Instance:
        self._n_joined += 1
        instance = Instance(instance_id, name, self._n_joined)
        self._instances[instance_id] = instance
        self._by_name.setdefault(name, {})[instance_id] = instance
        return instance

    def _touch(self, now: float, instance: Instance) -> None:
        since = now - self._heard_at
        if since > 0.0:
            self._mark += min(since, self._gap_s)
        self._heard_at = instance.heard_at = now
        instance.heard_mark = self._mark
        self._by_silence[instance.instance_id] = instance
        self._by_silence.move_to_end(instance.instance_id)

    def _outlives(self, now: float, info: InstanceInfo) -> bool:
        namesakes = self._by_name.get(info.name, {}).values()
        return not self.left_on_purpose(info.instance_id) and all(
            self.is_silent(other, now) for other in namesakes
        )

    def _replaced_by(self, instance: Instance) -> tuple[Instance, ...]:
        namesakes = self._by_name[instance.name].values()
        return tuple(other for other in namesakes if other is not instance)

    def _die(self, instance: Instance) -> None:
        self._by_silence.pop(instance.instance_id, None)
        was_live, instance.state = instance.state == "live", "dead"
        if was_live:
            self.n_live -= 1
            self._measure(instance.model_id)

    def _measure(self, model_id: str) -> None:
        sizes = [i.capacity for i in self._instances.values() if _serves(i, model_id)]
        if sizes:
            self._largest[model_id] = max(sizes)
        else:
            self._largest.pop(model_id, None)

    def _remove(self, instance: Instance) -> None:
        self._instances.pop(instance.instance_id, None)
        namesakes = self._by_name.get(instance.name, {})
        namesakes.pop(instance.instance_id, None)
        if not namesakes:
            self._by_name.pop(instance.name, None)


def _serves(instance: Instance, model_id: str) -> bool:
    return instance.state == "live" and instance.model_id == model_id
