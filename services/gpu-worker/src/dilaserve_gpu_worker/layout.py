"""Where a checkpoint keeps the tensors of each model: their names and shapes. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from dilaserve_gpu_worker.models.config import ModelConfig

__all__ = ["BlockNames", "TopNames", "beyond_last", "block_names", "tensor_shapes", "top_names"]


@dataclass(frozen=True, slots=True)
class TopNames:
    """Tensors outside of the blocks."""

    embedding: str
    final_norm: str
    head: str


@dataclass(frozen=True, slots=True)
class BlockNames:
    """Tensors of one block, without `.weight`."""

    attn_norm: str
    q: str
    k: str
    v: str
    attn_out: str
    ff_norm: str
    gate: str
    up: str
    down: str


def top_names(config: ModelConfig) -> TopNames:
    """Of the model's kind."""
    if config.model_type == "Dream":
        return TopNames("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    names = (f"model.transformer.{name}.weight" for name in ("wte", "ln_f", "ff_out"))
    return TopNames(*names)


def block_names(config: ModelConfig, index: int) -> BlockNames:
    """Of the block `index`, from 0."""
    return (_dream_names if config.model_type == "Dream" else _llada_names)(index)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor that is read."""
    v, d, top = config.vocab_size, config.d_model, top_names(config)
    shapes: dict[str, tuple[int, ...]] = {top.embedding: (v, d), top.final_norm: (d,)}
    if not config.tied_head:
        shapes[top.head] = (v, d)
    for index in range(config.n_layers):
        shapes |= _block_shapes(config, block_names(config, index))
    return shapes


def beyond_last(config: ModelConfig) -> str:
    """A tensor of the block after config.json's last: where it is there, so are others that would
    be left out silently."""
    return f"{block_names(config, config.n_layers).attn_norm}.weight"


def _block_shapes(config: ModelConfig, names: BlockNames) -> dict[str, tuple[int, ...]]:
    d, f = config.d_model, config.d_ff
    n_q, n_kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        f"{names.attn_norm}.weight": (d,),
        f"{names.q}.weight": (n_q, d),
        f"{names.k}.weight": (n_kv, d),
        f"{names.v}.weight": (n_kv, d),
        f"{names.attn_out}.weight": (d, n_q),
        f"{names.ff_norm}.weight": (d,),
        f"{names.gate}.weight": (f, d),
        f"{names.up}.weight": (f, d),
        f"{names.down}.weight": (d, f),
    }
    if config.model_type == "Dream":
        widths = {names.q: n_q, names.k: n_kv, names.v: n_kv}
        shapes |= {f"{name}.bias": (width,) for name, width in widths.items()}
    return shapes


def _llada_names(index: int) -> BlockNames:
    names = ("attn_norm", "q_proj", "k_proj", "v_proj", "attn_out", "ff_norm", "ff_proj", "up_proj")
    return BlockNames(*(f"model.transformer.blocks.{index}.{n}" for n in (*names, "ff_out")))


def _dream_names(index: int) -> BlockNames:
    block = f"model.layers.{index}"
    attention, mlp = f"{block}.self_attn", f"{block}.mlp"
    return BlockNames(
        attn_norm=f"{block}.input_layernorm",
        q=f"{attention}.q_proj",
        k=f"{attention}.k_proj",
        v=f"{attention}.v_proj",
        attn_out=f"{attention}.o_proj",
        ff_norm=f"{block}.post_attention_layernorm",
        gate=f"{mlp}.gate_proj",
        up=f"{mlp}.up_proj",
        down=f"{mlp}.down_proj",
    )
