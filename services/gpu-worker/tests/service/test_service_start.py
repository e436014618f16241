"""Starting: what an instance loads and says of itself; an error is one line and exit code 1."""

from __future__ import annotations

import os
import re
import signal
from types import SimpleNamespace

import pytest
import torch

from dilaserve.store.records import MASKED, DecodingSpec
from dilaserve_gpu_worker.__main__ import STOP_SIGNALS, main
from dilaserve_gpu_worker.engine.types import Credit, EngineRequest
from dilaserve_gpu_worker.loading import load_engine
from dilaserve_gpu_worker.settings import WorkerSettings
from dilaserve_gpu_worker.weights import weights_hash


@pytest.fixture
def environment(make_folder, monkeypatch):
    """A model and small waits; the process's signal handlers come back afterwards."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    n_threads = torch.get_num_threads()
    monkeypatch.setenv("DILASERVE_MODEL", str(make_folder()))
    monkeypatch.setenv("DILASERVE_START_TIMEOUT_S", "0.2")
    yield monkeypatch
    torch.set_num_threads(n_threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("MODEL", "/nowhere", "/nowhere/config.json cannot be read"),
        ("MODEL", "", "DILASERVE_MODEL not set"),
        ("CACHE_MODE", "triple", "DILASERVE_CACHE_MODE='triple'"),
        ("CRASH_AT", "somewhere", "DILASERVE_CRASH_AT='somewhere'"),
        ("CPU_AFFINITY", "999", "DILASERVE_CPU_AFFINITY='999'"),
        ("CPU_AFFINITY", "first", "DILASERVE_CPU_AFFINITY='first'"),
        ("CPU_AFFINITY", "9" * 40, "DILASERVE_CPU_AFFINITY='99999"),
        ("CPU_AFFINITY", f"{min(os.sched_getaffinity(0))},1023", "(1023 is not there); usable"),
        ("DEVICE", "abacus", "device 'abacus' is unknown"),
        ("DEVICE", "meta", "device 'meta' is unknown"),
        ("BLOCK_LENGTH", "9" * 12, "DILASERVE_BLOCK_LENGTH='999999999999': expected `int` <="),
        ("BLOCK_LENGTH", "512", "DILASERVE_BLOCK_LENGTH=512: a prompt of one token and a block"),
        ("MAX_BATCH_TOKENS", "9" * 18, "DILASERVE_MAX_BATCH_TOKENS='9999"),
        ("MAX_BATCH_TOKENS", "9" * 40, "DILASERVE_MAX_BATCH_TOKENS='9999"),
        ("MAX_BATCH_TOKENS", "32", "DILASERVE_MAX_BATCH_TOKENS=32 is no room for a prompt and"),
        ("KV_TOKENS", "63", "than the KV pool (32); use shorter blocks, or raise DILASERVE_KV_T"),
        ("KV_TOKENS", "9" * 40, "DILASERVE_KV_TOKENS='9999"),
        ("HEARTBEAT_MS", "9" * 400, "DILASERVE_HEARTBEAT_MS='9999"),
        ("PLAN_POLICY", "fifo", "DILASERVE_PLAN_POLICY='fifo'"),
        ("PLAN_TOKENS", "0", "DILASERVE_PLAN_TOKENS='0': expected `int` >= 1"),
        ("THREADS", "0", "DILASERVE_THREADS='0': expected `int` >= 1"),
        ("KV_TOKENS", "-5", "DILASERVE_KV_TOKENS='-5': expected `int` >= 0"),
        ("NATS_URL", "nats://127.0.0.1:9", "no NATS server answers"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(environment, capfd, variable, value, message):
    environment.setenv(f"DILASERVE_{variable}", value)
    with pytest.raises(SystemExit) as raised:
        main()
    assert raised.value.code == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("dilaserve-gpu-worker: ")
    assert message in last


def settings(folder, **of) -> WorkerSettings:
    return WorkerSettings(model=str(folder), **of)


def test_an_instance_says_what_it_loaded(make_folder):
    folder = make_folder()
    engine, info = load_engine(settings(folder, worker_name="w", kv_tokens=1000))
    assert re.fullmatch(r"w-[0-9a-f]{4}", info.instance_id)
    assert (info.name, info.model_id, info.weights_hash) == ("w", folder.name, weights_hash(folder))
    assert info.n_kv_tokens == engine.n_free_kv_tokens == 31 * 32
    assert (info.device, info.max_sequence_length) == ("cpu", 512)


def test_without_a_name_an_instance_is_called_after_its_host(make_folder, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-3.rack.example")
    _, info = load_engine(settings(make_folder(), kv_tokens=64))
    assert info.name == "gpu-3-rack-example"
    assert re.fullmatch(r"gpu-3-rack-example-[0-9a-f]{4}", info.instance_id)


@pytest.mark.parametrize(
    ("of", "ran"),
    [
        ({}, {"first", "second"}),
        ({"plan_policy": "static"}, {"first"}),
        ({"plan_policy": "sangam"}, {"first", "second"}),
        ({"plan_policy": "sangam", "plan_tokens": 30}, {"first"}),
    ],
)
def test_an_instance_plans_by_the_policy_that_it_is_told(make_folder, of, ran):
    """One request is in its block's cache steps, another comes."""
    engine, _ = load_engine(settings(make_folder(), kv_tokens=256, **of))
    spec = DecodingSpec(n_output=16, block_length=16, seed=0, ignore_eos=True)
    for name in ("first", "second"):
        engine.add(EngineRequest(name, [5] * 40, spec, 0, [MASKED] * 16, Credit(1.0, 9)))
        output = engine.step()
        assert output is not None
    assert {step.request_id for step in output.steps} == ran


def test_the_pool_is_sized_from_memory_but_no_larger_than_needed(make_folder, monkeypatch):
    folder = make_folder()
    assert load_engine(settings(folder))[1].n_kv_tokens == 64 * 512
    bytes_per_token = 2 * 2 * 48 * 4
    memory = SimpleNamespace(available=bytes_per_token * 32 * 50)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    assert load_engine(settings(folder))[1].n_kv_tokens == 5 * 32
    assert load_engine(settings(folder, cache_mode="none"))[1].n_kv_tokens == 0
