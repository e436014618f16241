"""Products with packed matrices: those of F.linear, whatever the shapes, and the same in any
batch. Where packing pays, and what happens where it cannot be had."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dilaserve.store.records import DecodingSpec
from dilaserve_gpu_worker.engine.alone import denoise_alone
from dilaserve_gpu_worker.models import products
from dilaserve_gpu_worker.models.products import can_pack, linear, packed, packing_pays
from dilaserve_gpu_worker.weights import load_model

CPU = torch.device("cpu")
SHAPES = [(1, 1), (3, 5), (7, 33), (61, 48), (352, 128), (128, 352), (100, 700), (64, 4096)]
CLOSE = 1e-5
needs_packing = pytest.mark.skipif(
    not can_pack(), reason="this torch has no oneDNN, or not the operators that packing takes"
)


def draw(n_rows: int, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, a matrix whose outputs are about as large, a bias."""
    random = torch.Generator().manual_seed(n_rows * shape[1] + shape[0])
    n_out, n_in = shape
    weight_NK = torch.randn(shape, generator=random) / math.sqrt(n_in)
    return (
        torch.randn(n_rows, n_in, generator=random),
        weight_NK,
        torch.randn(n_out, generator=random),
    )


@needs_packing
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n_rows", [0, 1, 2, 31, 32, 300])
def test_products_are_those_of_torch(shape: tuple[int, int], n_rows: int) -> None:
    x_TK, weight_NK, bias_N = draw(n_rows, shape)
    matrix = packed(weight_NK)
    assert matrix.is_mkldnn
    for bias in (None, bias_N):
        y_TN = linear(x_TK, matrix, bias)
        assert y_TN.shape == (n_rows, shape[0])
        assert (y_TN - F.linear(x_TK, weight_NK, bias)).abs().le(CLOSE).all()
        assert torch.equal(linear(x_TK, weight_NK, bias), F.linear(x_TK, weight_NK, bias))


@needs_packing
def test_inputs_may_lie_anyhow() -> None:
    x_TK, weight_NK, _ = draw(40, (61, 96))
    matrix = packed(weight_NK)
    expected = linear(x_TK, matrix)
    apart = torch.zeros(40, 200)[:, 1:193:2].copy_(x_TK)
    turned = x_TK.t().contiguous().t()
    for x in (apart, turned):
        assert not x.is_contiguous()
        assert torch.equal(linear(x, matrix), expected)


@needs_packing
def test_a_packed_matrix_is_a_copy() -> None:
    x_TK, weight_NK, _ = draw(32, (61, 48))
    matrix = packed(weight_NK)
    expected = linear(x_TK, matrix)
    weight_NK.zero_()
    assert torch.equal(linear(x_TK, matrix), expected)


@needs_packing
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_its_bits_in_any_batch(shape: tuple[int, int]) -> None:
    x_TK, weight_NK, bias_N = draw(320, shape)
    matrix = packed(weight_NK)
    whole = linear(x_TK, matrix, bias_N)
    alone = [1] if shape[1] <= 1024 else []
    for n_rows in (*alone, 2, 3, 5, 31, 32, 33, 64, 160, 288):
        for start in (0, 7, 32):
            part = slice(start, start + n_rows)
            assert torch.equal(linear(x_TK[part], matrix, bias_N), whole[part]), (n_rows, start)


# --- where it pays -------------------------------------------------------------------------------


@pytest.fixture
def cpu_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    def be(maker: str, capability: str) -> None:
        info = tmp_path / "cpuinfo"
        info.write_text(f"processor\t: 0\nvendor_id\t: {maker}\n")
        monkeypatch.setattr(products, "CPU_INFO", info)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)

    return be


@pytest.mark.parametrize(
    ("maker", "capability", "pays"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("HygonGenuine", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),
        ("GenuineIntel", "AVX512", False),
        ("GenuineIntel", "AVX2", False),
    ],
)
def test_it_pays_where_mkl_leaves_avx512_unused(
    cpu_of: Callable[[str, str], None], maker: str, capability: str, pays: bool
) -> None:
    cpu_of(maker, capability)
    assert packing_pays(CPU, torch.float32) == pays
    assert not packing_pays(CPU, torch.bfloat16)
    assert not packing_pays(torch.device("cuda"), torch.float32)


def test_it_does_not_pay_where_the_maker_is_unknown(
    cpu_of: Callable[[str, str], None], tmp_path: Path
) -> None:
    cpu_of("AuthenticAMD", "AVX512")
    (tmp_path / "cpuinfo").unlink()
    assert not packing_pays(CPU, torch.float32)


@pytest.mark.parametrize("missing", ["nothing", "an operator", "oneDNN"])
def test_a_model_is_loaded_plain_where_packing_cannot_be_had(
    missing: str,
    cpu_of: Callable[[str, str], None],
    make_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu_of("AuthenticAMD", "AVX512")
    if missing == "an operator":
        monkeypatch.setattr(products, "OPERATORS", (*products.OPERATORS, "_gone_with_torch_3"))
    if missing == "oneDNN":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    folder = make_folder()
    model, plain = load_model(folder), load_model(folder, packs=False)
    assert model.is_packed == (missing == "nothing" and can_pack())
    assert not plain.is_packed
    assert not load_model(folder, dtype=torch.bfloat16).is_packed
    spec = DecodingSpec(n_output=24, block_length=8, seed=0, ignore_eos=True)
    found, expected = (
        denoise_alone(each, [5, 6, 7], spec, cache_mode="dual", threshold=0.6)
        for each in (model, plain)
    )
    assert found.sequence == expected.sequence
