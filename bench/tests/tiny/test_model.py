"""The training code's forward pass is the serving engine's, and a run resumes where it stopped."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dilaserve_bench.tiny.decode import decode
from dilaserve_bench.tiny.evaluate import Case, denoise
from dilaserve_bench.tiny.layout import (
    BLOCK_LENGTH,
    MASK,
    VOCAB_SIZE,
    prompt_tokens,
    vocabulary,
)
from dilaserve_bench.tiny.model import TinyConfig, TinyLLaDA
from dilaserve_bench.tiny.muon import orthogonalise
from dilaserve_bench.tiny.tasks import TASKS, held_out_problem
from dilaserve_bench.tiny.train import (
    export,
    learning_rate_factor,
    parse_arguments,
    run_rank,
)
from dilaserve_gpu_worker.weights import load_model

BUNDLED = Path(__file__).parents[3] / "models" / "tiny"
GOLDEN = Path(__file__).parents[4] / "shared" / "golden" / "llada-mha"
SMALL = ["--d-model", "32", "--mlp", "48", "--layers", "2", "--no-compile", "--processes", "1"]


def train(folder: Path, steps: int) -> None:
    run_rank(0, parse_arguments(["--work", str(folder), "--steps", str(steps), *SMALL]))


def trained(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoint.pt", weights_only=True)["model"]


def test_muon_s_update_has_singular_values_near_one() -> None:
    matrices = torch.randn(3, 48, 32, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert float(values.min()) > 0.5
    assert float(values.max()) < 1.4


def test_learning_rate_warms_up_stays_and_falls_to_zero() -> None:
    factors = [learning_rate_factor(step, 1000) for step in (0, 99, 500, 800, 1000)]
    assert factors == [pytest.approx(0.01), 1.0, 1.0, pytest.approx(0.5), 0.0]


def test_training_lowers_the_loss_and_resumes_exactly(tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for folder in (whole, halves):
        folder.mkdir()
    train(whole, 4)
    run_rank(0, parse_arguments(["--work", str(halves), "--steps", "4", "--stop-at", "2", *SMALL]))
    train(halves, 4)
    first, second = trained(whole), trained(halves)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_exported_folder_holds_the_trained_weights_for_the_engine(tmp_path: Path) -> None:
    train(tmp_path, 1)
    export(tmp_path, tmp_path / "model")
    assert load_model(tmp_path / "model").config.mask_id == vocabulary()[MASK]
    for name, tensor in load_file(tmp_path / "model" / "model.safetensors").items():
        assert torch.equal(tensor, trained(tmp_path)[name])


def test_engine_decodes_as_the_training_code_does() -> None:
    model = TinyLLaDA(TinyConfig())
    model.load_state_dict(load_file(BUNDLED / "model.safetensors"))
    problems = [held_out_problem(task, 64, 9, 0) for task in TASKS]
    prompts = [prompt_tokens(p.task, p.parameter, p.data) for p in problems]
    ids = [[vocabulary()[token] for token in prompt] for prompt in prompts]
    canvas, steps = decode(
        lambda rows: model(rows, torch.arange(rows.shape[1])),
        torch.tensor(ids), 64, BLOCK_LENGTH, vocabulary()[MASK], 0.9,
    )  # fmt: skip
    cases = [Case(problem, prompt) for problem, prompt in zip(problems, ids, strict=True)]
    served = denoise(load_model(BUNDLED), cases, "none", lambda _case, _step: 0.9)
    assert [tokens for tokens, _ in served] == canvas.tolist()
    assert [n_steps for _, n_steps in served] == steps.tolist()


@pytest.mark.skipif(not GOLDEN.exists(), reason="the golden checkpoints are not here")
def test_tensor_names_and_config_keys_are_llada_s() -> None:
    golden = {name.replace(".2.", ".0.") for name in load_file(GOLDEN / "model.safetensors")}
    ours = {name.replace(".5.", ".0.") for name in load_file(BUNDLED / "model.safetensors")}
    first = {name for name in ours if ".blocks." not in name or ".blocks.0." in name}
    assert first == {name for name in golden if ".blocks." not in name or ".blocks.0." in name}
    published = json.loads((GOLDEN / "config.json").read_text())
    config = json.loads((BUNDLED / "config.json").read_text())
    assert config.keys() - published.keys() <= {"torch_dtype"}


def test_bundled_model_divides_by_eight_ranks_and_is_small() -> None:
    config = json.loads((BUNDLED / "config.json").read_text())
    for key in ("n_heads", "n_kv_heads", "mlp_hidden_size", "vocab_size", "embedding_size"):
        assert config[key] % 8 == 0
    assert sum(path.stat().st_size for path in BUNDLED.iterdir()) < 15_000_000


def test_decoding_unmasks_block_by_block_and_at_least_one_a_step() -> None:
    mask = vocabulary()[MASK]

    def forward(ids: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*ids.shape, VOCAB_SIZE)
        logits[..., mask] = 9.0
        logits[:, 1::2, 7] = 12.0
        return logits

    prompts = torch.zeros(2, 4, dtype=torch.long)
    canvas, steps = decode(forward, prompts, 8, 4, mask, 0.9)
    assert not bool((canvas == mask).any())
    assert steps.tolist() == [6, 6]


def test_model_predicts_only_from_the_first_logit_on() -> None:
    model = TinyLLaDA(TinyConfig(d_model=32, mlp_hidden_size=48, n_layers=1))
    ids = torch.arange(10)[None]
    whole = model(ids, torch.arange(10))
    assert whole.shape == (1, 10, VOCAB_SIZE)
    torch.testing.assert_close(model(ids, torch.arange(10), 6), whole[:, 6:])
