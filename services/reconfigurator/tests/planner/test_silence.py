"""Who is taken for stopped or stuck, and who is not."""

from __future__ import annotations

from dilaserve_reconfigurator.silence import Silence

RUNNING = ["a", "b"]


def looks(silence: Silence, times: range, *, heard: tuple[str, ...]) -> list[list[str]]:
    """What each look finds, a second after these were heard."""
    found = []
    for now in times:
        for name in heard:
            silence.heard(name)
        found.append(silence.look(float(now), RUNNING))
    return found


def test_one_that_was_heard_and_is_silent_while_others_are_not() -> None:
    silence = Silence(30.0, 300.0)
    assert not any(looks(silence, range(10), heard=("a", "b")))
    found = looks(silence, range(10, 42), heard=("a",))
    assert found == [[]] * 29 + [["b"]] * 3
    assert looks(silence, range(42, 43), heard=("a", "b")) == [[]], "it lives after all"


def test_requests_of_clients_are_a_sign_that_the_bus_works() -> None:
    silence = Silence(3.0, 300.0)
    looks(silence, range(2), heard=("a", "b"))
    assert looks(silence, range(2, 6), heard=("",))[-1] == RUNNING


def test_nobody_is_blamed_where_nothing_is_heard_at_all() -> None:
    silence = Silence(30.0, 300.0)
    looks(silence, range(2), heard=("a", "b"))
    assert not any(looks(silence, range(2, 600), heard=()))
    assert not any(looks(silence, range(600, 605), heard=("a",))), "b is still to come back"


def test_one_that_loads_has_the_time_of_a_launch() -> None:
    silence = Silence(30.0, 300.0)
    found = looks(silence, range(302), heard=("a",))
    assert not any(found[:300])
    assert found[300:] == [["b"]] * 2


def test_a_planner_that_was_stopped_itself_blames_nobody() -> None:
    silence = Silence(30.0, 300.0)
    looks(silence, range(2), heard=("a", "b"))
    silence.heard()
    assert silence.look(3600.0, RUNNING) == []


def test_without_a_limit_nobody_is_blamed() -> None:
    silence = Silence(0.0, 300.0)
    assert not any(looks(silence, range(1000), heard=("a",)))
