"""The engine's process, talked to by hand: how it ends, and what it says then."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest

from dilaserve_gpu_worker.frames import LENGTH, frame, read_frame
from dilaserve_gpu_worker.host.orders import End, Ended, Lost, Ready, Remove, Report

GARBAGE = {
    "no MessagePack": LENGTH.pack(3) + b"\xc1\xc1\xc1",
    "no order": frame([{"type": "Stand on your head"}]),
    "one order, not a list": frame(Remove("r")),
    "nothing": LENGTH.pack(0),
}


@pytest.fixture
def host(make_folder):
    """Starts it; ends it at the end of a with-block."""

    @contextmanager
    def start(
        *, preexec_fn: Callable[[], None] | None = None, **env: str
    ) -> Iterator[subprocess.Popen[bytes]]:
        with subprocess.Popen(
            [sys.executable, "-m", "dilaserve_gpu_worker.host"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"DILASERVE_MODEL": str(make_folder()), **env},
            preexec_fn=preexec_fn,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    return start


def heard(process: subprocess.Popen[bytes]) -> Report | None:
    data = read_frame(process.stdout)
    return None if data is None else msgspec.msgpack.decode(data, type=Report)


def tell(process: subprocess.Popen[bytes], data: bytes) -> None:
    process.stdin.write(data)
    process.stdin.flush()


def words(process: subprocess.Popen[bytes], code: int) -> bytes:
    assert process.wait(20) == code
    return process.stderr.read()


def test_it_ends_while_it_could_still_be_given_orders(host):
    with host() as process:
        assert isinstance(heard(process), Ready)
        tell(process, frame([End()]))
        assert heard(process) == Ended()
        assert words(process, 0) == b""


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=list(GARBAGE))
def test_an_order_that_cannot_be_read_ends_it(host, garbage):
    with host() as process:
        assert isinstance(heard(process), Ready)
        tell(process, garbage)
        lost = heard(process)
        assert isinstance(lost, Lost)
        assert "cannot read its orders" in lost.reason
        assert words(process, 0) == b""


@pytest.mark.parametrize("last", [b"", LENGTH.pack(10) + b"ab", b"\xff\xff\xff\xffab"])
def test_the_end_of_its_orders_ends_it_in_the_middle_of_one_too(host, last):
    with host() as process:
        assert isinstance(heard(process), Ready)
        tell(process, last)
        process.stdin.close()
        assert heard(process) == Ended()
        assert words(process, 0) == b""


def test_a_memory_that_is_full_is_named(host):
    """A pool of KV that fits beside the model, but not into what the process may map."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))

    with host(preexec_fn=limit, DILASERVE_KV_TOKENS=str(2**24)) as process:
        lost = heard(process)
        assert isinstance(lost, Lost)
        assert "the engine's memory is full (" in lost.reason
        assert b"Traceback" not in words(process, 1)
