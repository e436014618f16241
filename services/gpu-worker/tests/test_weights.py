"""Model folders: what is read from them, and what is said of broken ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dilaserve.errors import ModelFolderError
from dilaserve.store.records import DecodingSpec
from dilaserve_gpu_worker.check import check_start
from dilaserve_gpu_worker.engine.alone import denoise_alone
from dilaserve_gpu_worker.models.model import Model
from dilaserve_gpu_worker.weights import load_model, read_config, shard_config, weights_hash

MakeFolder = Callable[..., Path]
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 4960864\n"
SPEC = DecodingSpec(n_output=24, block_length=8, seed=0, ignore_eos=True)


def denoise(model: Model) -> list[int]:
    return denoise_alone(model, [5, 6, 7], SPEC, cache_mode="dual", threshold=0.6).sequence


def look_at(folder: Path) -> None:
    """As before a worker is started, without torch."""
    check_start({"DILASERVE_MODEL": str(folder)})


def rewrite(folder: Path, name: str, **changes: Any) -> None:
    path = folder / name
    fields = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(fields | changes))


def split(folder: Path, n_shards: int) -> None:
    """Turn a folder's single file into shards with an index."""
    tensors = sorted(load_file(folder / "model.safetensors").items())
    weight_map = {}
    for index in range(n_shards):
        shard = f"model-{index + 1:05}-of-{n_shards:05}.safetensors"
        part = dict(tensors[index::n_shards])
        save_file(part, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    rewrite(folder, "model.safetensors.index.json", weight_map=weight_map)
    (folder / "model.safetensors").unlink()


def test_shards_are_the_single_file(make_folder: MakeFolder) -> None:
    folder = make_folder()
    expected = denoise(load_model(folder))
    split(folder, 3)
    assert denoise(load_model(folder)) == expected


def test_grouped_heads_are_repeated_heads(make_folder: MakeFolder) -> None:
    grouped = make_folder(n_kv_heads=2)
    repeated = make_folder()
    tensors = load_file(grouped / "model.safetensors")
    for name, tensor in tensors.items():
        if "k_proj" in name or "v_proj" in name:
            heads = tensor.view(2, 12, 48).repeat_interleave(2, dim=0)
            tensors[name] = heads.reshape(48, 48)
    save_file(tensors, repeated / "model.safetensors")
    assert denoise(load_model(grouped)) == denoise(load_model(repeated))


def test_a_tied_head_is_the_embedding(make_folder: MakeFolder) -> None:
    untied = make_folder()
    tensors = load_file(untied / "model.safetensors")
    tensors["model.transformer.ff_out.weight"] = tensors["model.transformer.wte.weight"].clone()
    save_file(tensors, untied / "model.safetensors")
    tied = make_folder(weight_tying=True)
    del tensors["model.transformer.ff_out.weight"]
    save_file(tensors, tied / "model.safetensors")
    assert denoise(load_model(tied)) == denoise(load_model(untied))


def test_type_on_a_cpu_is_fp32_unless_asked(make_folder: MakeFolder) -> None:
    folder = make_folder()
    stored = {n: t.bfloat16() for n, t in load_file(folder / "model.safetensors").items()}
    save_file(stored, folder / "model.safetensors")
    assert load_model(folder).dtype == torch.float32
    half = load_model(folder, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert len(denoise(half)) == 27


def test_a_weight_beyond_16_bits_is_told(make_folder: MakeFolder) -> None:
    folder = make_folder()
    _with_a_weight_of(70_000.0)(folder)
    assert load_model(folder).dtype == torch.float32
    with pytest.raises(ModelFolderError, match=r"float16; .* DILASERVE_DTYPE=float32"):
        load_model(folder, dtype=torch.float16)


def test_changing_the_file_leaves_a_loaded_model_alone(make_folder: MakeFolder) -> None:
    folder = make_folder()
    model = load_model(folder)
    expected = denoise(model)
    (folder / "model.safetensors").write_bytes(b"")
    assert denoise(model) == expected


def test_eos_ids_come_from_every_place_that_names_them(make_folder: MakeFolder) -> None:
    folder = make_folder(eos_token_id=59)
    assert read_config(folder).eos_ids == {59}
    rewrite(folder, "generation_config.json", eos_token_id=[58, 57])
    added = [{"id": 56, "content": "<|eot_id|>"}, {"id": 55, "content": "<bos>"}]
    rewrite(folder, "tokenizer.json", added_tokens=added)
    assert read_config(folder).eos_ids == {56, 57, 58, 59}
    rewrite(folder, "config.json", eos_token_id=None)
    assert read_config(folder).eos_ids == {56, 57, 58}


def test_sizes_that_a_config_may_leave_out(make_folder: MakeFolder) -> None:
    config = read_config(
        make_folder(n_kv_heads=4, mlp_hidden_size=72, embedding_size=61, vocab_size=50)
    )
    assert (config.n_kv_heads, config.d_ff, config.vocab_size) == (4, 72, 61)
    folder = make_folder()
    rewrite(folder, "config.json", n_kv_heads=None, mlp_hidden_size=None, mlp_ratio=4)
    assert (read_config(folder).n_kv_heads, read_config(folder).d_ff) == (4, 192)
    rewrite(folder, "config.json", multi_query_attention=True)
    assert read_config(folder).n_kv_heads == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen2"}, "model_type 'qwen2', which is unknown"),
        ({"model_type": None}, "model_type None, which is unknown"),
        ({"mask_token_id": None}, "mask_token_id None; set it"),
        ({"mask_token_id": 61}, "mask_token_id 61 is outside the vocabulary of 61"),
        ({"d_model": "big"}, "d_model 'big'; set it to an integer"),
        ({"n_heads": 5}, "d_model 48 over n_heads 5 is not an even head width"),
        ({"n_kv_heads": 3}, "n_heads 4 is no multiple of n_kv_heads 3"),
        ({"activation_type": "gelu"}, "activation_type 'gelu'"),
        ({"include_bias": True}, "include_bias True"),
        ({"n_layers": 3}, "lacks the tensor model.transformer.blocks.2.attn_norm.weight"),
        ({"mlp_hidden_size": 80}, r"ff_proj.weight has shape \[72, 48\], config.json says \[80,"),
        ({"mlp_hidden_size": None, "mlp_ratio": "x"}, "mlp_ratio 'x'; set it to an integer"),
        ({"n_layers": 1}, "holds model.transformer.blocks.1.attn_norm.weight, beyond the last"),
        ({"max_sequence_length": 10**12}, "max_sequence_length 1000000000000; .* from 1 to 16777"),
        ({"rope_theta": "x"}, "rope_theta 'x'; set it to a number above 0"),
        ({"rope_theta": 0}, "rope_theta 0; set it to a number above 0"),
        ({"rms_norm_eps": -1}, "rms_norm_eps -1; set it to a number above 0"),
        ({"weight_tying": "false"}, "weight_tying 'false'; set it to true or false"),
        ({"eos_token_id": "x"}, "eos_token_id 'x'; set it to a token id or a list"),
        ({"eos_token_id": [1, None]}, r"eos_token_id \[1, None\]; set it to a token id or a list"),
        ({"eos_token_id": -1}, "eos_token_id -1; set it to a token id or a list"),
        ({"eos_token_id": 61}, "eos_token_id 61, outside the vocabulary of 61"),
        ({"eos_token_id": [59, 99]}, r"eos_token_id \[59, 99\], outside the vocabulary of 61"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\)"),
        ({"quantization_config": {}}, r"quantization_config \(without a quant_method\)"),
    ],
)
def test_a_config_that_cannot_be_served(
    make_folder: MakeFolder, changes: dict[str, Any], words: str
) -> None:
    folder = make_folder()
    rewrite(folder, "config.json", **changes)
    with pytest.raises(ModelFolderError, match=words):
        load_model(folder)
    with pytest.raises(ModelFolderError, match=words):
        look_at(folder)


def _without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _without_a_shard(folder: Path) -> None:
    split(folder, 2)
    (folder / "model-00002-of-00002.safetensors").unlink()


def _without_an_index(folder: Path) -> None:
    split(folder, 2)
    (folder / "model.safetensors.index.json").unlink()


def _with_a_link_to_nothing(folder: Path) -> None:
    _without_weights(folder)
    (folder / "model.safetensors").symlink_to("../blobs/gone")


def _with_a_shard_that_links_to_nothing(folder: Path) -> None:
    _without_a_shard(folder)
    (folder / "model-00002-of-00002.safetensors").symlink_to("../blobs/gone")


def _with_weights_cut_off(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-4])


def _with_a_tensor_twice(folder: Path) -> None:
    split(folder, 2)
    first, second = (folder / f"model-{n:05}-of-00002.safetensors" for n in (1, 2))
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: 2 * tensor}, second)


def _with_an_empty_index(folder: Path) -> None:
    _without_weights(folder)
    rewrite(folder, "model.safetensors.index.json", weight_map={})


def _with_damaged_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not safetensors")


def _with_a_damaged_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _with_a_deep_config(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)


def _with_a_shard_named(name: object) -> Callable[[Path], None]:
    """A folder whose index names one shard so; such a file exists beside the folder."""

    def damage(folder: Path) -> None:
        split(folder, 2)
        shutil.copy(folder / "model-00001-of-00002.safetensors", folder.parent / "beside.st")
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        first = next(iter(index["weight_map"]))
        rewrite(
            folder, "model.safetensors.index.json", weight_map=index["weight_map"] | {first: name}
        )

    return damage


def _with_quantized_weights(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t.to(torch.int8) for n, t in tensors.items()}, folder / "model.safetensors")


def _with_a_weight_of(value: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors["model.transformer.blocks.1.q_proj.weight"][2, 3] = value
        save_file(tensors, folder / "model.safetensors")

    return damage


def _with(name: str, text: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_text(text)

    return damage


def _without_itself(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_without_weights, "has neither model.safetensors nor model.safetensors.index.json"),
        (_without_a_shard, "lacks the shard model-00002-of-00002.safetensors; download it again"),
        (
            _without_an_index,
            "model-00001-of-00002.safetensors and others, and no model.safetensors.",
        ),
        (_with_a_link_to_nothing, "is a link to ../blobs/gone, which does not exist; download it"),
        (
            _with_a_shard_that_links_to_nothing,
            "00002.safetensors is a link to ../blobs/gone, which",
        ),
        (_with_weights_cut_off, "is no readable safetensors file"),
        (_with("model.safetensors", LFS_POINTER), "pointer of Git LFS, .* `git lfs pull`"),
        (_with("config.json", LFS_POINTER), "pointer of Git LFS, .* `git lfs pull`"),
        (_with_a_tensor_twice, "in model-00002-of-00002.safetensors and in a shard before it"),
        (_with_an_empty_index, "has no weight_map"),
        (_with_damaged_weights, "is no readable safetensors file"),
        (_with_a_damaged_config, "is not JSON"),
        (_with_a_deep_config, "is not JSON"),
        (_with_a_shard_named("../beside.st"), "the shard '../beside.st', which is no file of the"),
        (_with_a_shard_named("sub/a.st"), "the shard 'sub/a.st', which is no file of the folder"),
        (_with_a_shard_named(5), "names the shard 5, which is no file of the folder"),
        (_with_a_shard_named({}), "names the shard {}, which is no file of the folder"),
        (_with_a_shard_named(""), "lacks the shard ; download it again"),
        (_with_a_weight_of(float("nan")), "q_proj.weight holds NaN or infinity in float32"),
        (_with_a_weight_of(float("-inf")), "q_proj.weight holds NaN or infinity in float32"),
        (_with_quantized_weights, "wte.weight is stored as I8; quantized weights are not"),
        (_with("generation_config.json", '{"eos_token_id": "x"}'), "eos_token_id 'x'; set it to"),
        (
            _with("generation_config.json", '{"eos_token_id": 61}'),
            "generation_config.json has eos",
        ),
        (_with("tokenizer.json", '{"added_tokens": [1]}'), "tokenizer.json lists its added tokens"),
        (_with("tokenizer.json", '{"added_tokens": [{}]}'), "in a form that is not known .KeyErr"),
        (_with("tokenizer_config.json", '{"added_tokens_decoder": [1]}'), "tokenizer_config.json"),
        (_with("added_tokens.json", '{"<|im_end|>": "x"}'), "added_tokens.json lists its added"),
        (_without_itself, "cannot be read .No such file or directory.; give the folder"),
    ],
)
def test_a_broken_folder(
    make_folder: MakeFolder, damage: Callable[[Path], None], words: str
) -> None:
    folder = make_folder()
    damage(folder)
    with pytest.raises(ModelFolderError, match=words) as error:
        load_model(folder)
    assert str(folder) in str(error.value)
    if "NaN" in words:
        look_at(folder)  # which reads no weights
        return
    with pytest.raises(ModelFolderError, match=words):
        look_at(folder)


def test_shards_may_be_links_as_in_a_cache(make_folder: MakeFolder, tmp_path: Path) -> None:
    folder = make_folder()
    expected = denoise(load_model(folder))
    split(folder, 2)
    for number, shard in enumerate(folder.glob("model-*.safetensors")):
        shard.rename(tmp_path / f"blob-{number}")
        shard.symlink_to(tmp_path / f"blob-{number}")
    assert denoise(load_model(folder)) == expected


def test_a_degree_that_does_not_divide_the_model_names_those_that_do(
    make_folder: MakeFolder,
) -> None:
    config = read_config(make_folder(vocab_size=64))
    assert shard_config(config, 4).n_heads == 1
    with pytest.raises(ModelFolderError, match=r"query heads \(4\); use a degree of 1, 2 or 4"):
        shard_config(config, 8)


def test_double_precision_is_computed_in_single(make_folder: MakeFolder) -> None:
    folder = make_folder()
    expected = denoise(load_model(folder))
    doubled = {n: t.double() for n, t in load_file(folder / "model.safetensors").items()}
    save_file(doubled, folder / "model.safetensors")
    assert load_model(folder).dtype == torch.float32
    assert denoise(load_model(folder)) == expected


def test_weights_hash_tells_models_apart(make_folder: MakeFolder) -> None:
    folder, same = make_folder(), make_folder()
    original = weights_hash(folder)
    assert weights_hash(same) == original
    assert len(original) == 16
    rewrite(same, "config.json", rope_theta=501.0)
    assert weights_hash(same) != original
    tensors = load_file(folder / "model.safetensors")
    tensors["model.transformer.ln_f.weight"][3] += 1e-3
    save_file(tensors, folder / "model.safetensors")
    assert weights_hash(folder) != original


# --- Dream ---------------------------------------------------------------------------------------


def test_dream_is_read_from_its_own_words(make_dream_folder: MakeFolder) -> None:
    config = read_config(make_dream_folder())
    assert (config.d_model, config.n_heads, config.n_kv_heads, config.head_dim) == (48, 4, 2, 12)
    assert (config.d_ff, config.vocab_size, config.logit_shift) == (72, 62, 1)
    assert (config.mask_id, config.eos_ids, config.rms_norm_eps) == (60, {59}, 1e-6)


def test_the_context_of_dream_is_what_it_was_trained_for(make_dream_folder: MakeFolder) -> None:
    folder = make_dream_folder(max_position_embeddings=131_072)
    assert read_config(folder).max_sequence_length == 2048
    assert read_config(make_dream_folder()).max_sequence_length == 512


def test_ends_of_turn_of_a_tokenizer_without_its_json(make_dream_folder: MakeFolder) -> None:
    folder = make_dream_folder()
    rewrite(folder, "tokenizer_config.json", added_tokens_decoder={"58": {"content": "<|im_end|>"}})
    assert read_config(folder).eos_ids == {58, 59}
    rewrite(folder, "added_tokens.json", **{"<|im_end|>": 57, "<|mask|>": 60})
    assert read_config(folder).eos_ids == {57, 58, 59}


def test_dream_from_shards(make_dream_folder: MakeFolder) -> None:
    folder = make_dream_folder()
    expected = denoise(load_model(folder))
    look_at(folder)
    split(folder, 4)
    look_at(folder)
    assert denoise(load_model(folder)) == expected
    (folder / "model-00003-of-00004.safetensors").unlink()
    with pytest.raises(ModelFolderError, match="lacks the shard model-00003-of-00004"):
        load_model(folder)
    with pytest.raises(ModelFolderError, match="lacks the shard model-00003-of-00004"):
        look_at(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_sliding_window": True}, "use_sliding_window True, which the Dream code does not"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"num_key_value_heads": 3}, "n_heads 4 is no multiple of n_kv_heads 3"),
        ({"mask_token_id": 62}, "mask_token_id 62 is outside the vocabulary of 62"),
        ({"intermediate_size": 80}, r"mlp.gate_proj.weight has shape \[72, 48\].*\[80, 48\]"),
        ({"num_hidden_layers": 3}, r"lacks the tensor model.layers.2"),
        ({"num_hidden_layers": 1}, r"holds model.layers.1.input_layernorm.weight, beyond the last"),
        ({"rope_theta": True}, "rope_theta True; set it to a number above 0"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings 1; set it to true or false"),
    ],
)
def test_what_is_wrong_with_a_dream_folder_is_told(
    make_dream_folder: MakeFolder, changes: dict[str, Any], words: str
) -> None:
    folder = make_dream_folder()
    rewrite(folder, "config.json", **changes)
    with pytest.raises(ModelFolderError, match=words):
        load_model(folder)
    with pytest.raises(ModelFolderError, match=words):
        look_at(folder)
