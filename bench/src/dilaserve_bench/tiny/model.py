"""LLaDA's architecture for training the tiny model: dense batches, no cache, no serving.

Parameter names are the published checkpoint's, so the state dict is the checkpoint. The serving
engine has its own forward pass.

Shape letters: B batch, L sequence, D d_model, H heads, E head dimension.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dilaserve_bench.tiny.layout import EOS, MASK, PAD, VOCAB_SIZE, vocabulary


@dataclass(frozen=True, slots=True)
class TinyConfig:
    """The dimensions of the model, named as in LLaDA's config.json."""

    d_model: int = 128
    n_heads: int = 8
    n_layers: int = 6
    mlp_hidden_size: int = 352
    max_sequence_length: int = 1024
    rope_theta: float = 200.0
    rms_norm_eps: float = 1e-5


def hub_config(config: TinyConfig) -> dict[str, object]:
    """config.json with LLaDA's keys."""
    token_id = vocabulary()
    return {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "d_model": config.d_model,
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_heads,
        "n_layers": config.n_layers,
        "mlp_hidden_size": config.mlp_hidden_size,
        "vocab_size": VOCAB_SIZE,
        "embedding_size": VOCAB_SIZE,
        "max_sequence_length": config.max_sequence_length,
        "rope": True,
        "rope_theta": config.rope_theta,
        "rope_full_precision": True,
        "layer_norm_type": "rms",
        "rms_norm_eps": config.rms_norm_eps,
        "activation_type": "silu",
        "block_type": "llama",
        "include_bias": False,
        "include_qkv_bias": False,
        "attention_layer_norm": False,
        "weight_tying": False,
        "mask_token_id": token_id[MASK],
        "eos_token_id": token_id[EOS],
        "pad_token_id": token_id[PAD],
        "torch_dtype": "float32",
    }


class RMSNorm(nn.Module):
    """Root mean square norm in fp32, then the weight."""

    def __init__(self, d_model: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.eps = eps

    def forward(self, x_BLD: Tensor) -> Tensor:
        x = x_BLD.float()
        normed: Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return normed * self.weight


class Block(nn.Module):
    """Pre-norm bidirectional attention and SwiGLU."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        d, hidden = config.d_model, config.mlp_hidden_size
        self.n_heads = config.n_heads
        self.attn_norm = RMSNorm(d, config.rms_norm_eps)
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj = nn.Linear(d, d, bias=False)
        self.v_proj = nn.Linear(d, d, bias=False)
        self.attn_out = nn.Linear(d, d, bias=False)
        self.ff_norm = RMSNorm(d, config.rms_norm_eps)
        self.ff_proj = nn.Linear(d, hidden, bias=False)
        self.up_proj = nn.Linear(d, hidden, bias=False)
        self.ff_out = nn.Linear(hidden, d, bias=False)

    def forward(self, x_BLD: Tensor, cos_LE: Tensor, sin_LE: Tensor) -> Tensor:
        x_BLD = x_BLD + self._attention(self.attn_norm(x_BLD), cos_LE, sin_LE)
        h_BLD = self.ff_norm(x_BLD)
        gated = nn.functional.silu(self.ff_proj(h_BLD)) * self.up_proj(h_BLD)
        out_BLD: Tensor = x_BLD + self.ff_out(gated)
        return out_BLD

    def _attention(self, h_BLD: Tensor, cos_LE: Tensor, sin_LE: Tensor) -> Tensor:
        batch, length, d = h_BLD.shape
        heads = (batch, length, self.n_heads, d // self.n_heads)
        q = rotate(self.q_proj(h_BLD).view(heads).transpose(1, 2), cos_LE, sin_LE)
        k = rotate(self.k_proj(h_BLD).view(heads).transpose(1, 2), cos_LE, sin_LE)
        v = self.v_proj(h_BLD).view(heads).transpose(1, 2)
        # Plain products: on a CPU the backward pass of SDPA is 1.5 times slower.
        scores = q @ k.transpose(-1, -2) / math.sqrt(heads[-1])
        mixed = torch.softmax(scores.float(), -1).to(v.dtype) @ v
        out_BLD: Tensor = self.attn_out(mixed.transpose(1, 2).reshape(batch, length, d))
        return out_BLD


def rotate(x_BHLE: Tensor, cos_LE: Tensor, sin_LE: Tensor) -> Tensor:
    """Half-split rotary embedding in fp32, returned in the input's type."""
    first, second = x_BHLE.float().chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return (x_BHLE.float() * cos_LE + turned * sin_LE).to(x_BHLE.dtype)


class _Transformer(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB_SIZE, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.ln_f = RMSNorm(config.d_model, config.rms_norm_eps)
        self.ff_out = nn.Linear(config.d_model, VOCAB_SIZE, bias=False)


class _Model(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.transformer = _Transformer(config)


class TinyLLaDA(nn.Module):
    """The model; its state dict has LLaDA's tensor names (`model.transformer.…`)."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Model(config)
        initialise(self)

    def forward(self, ids_BL: Tensor, positions_L: Tensor, first_logit: int = 0) -> Tensor:
        """Logits (B, L − first_logit, vocabulary) of the positions from `first_logit` on."""
        transformer = self.model.transformer
        cos_LE, sin_LE = self._angles(positions_L)
        x_BLD = transformer.wte(ids_BL)
        for block in transformer.blocks:
            x_BLD = block(x_BLD, cos_LE, sin_LE)
        logits_BLV: Tensor = transformer.ff_out(transformer.ln_f(x_BLD[:, first_logit:]))
        return logits_BLV

    def _angles(self, positions_L: Tensor) -> tuple[Tensor, Tensor]:
        size = self.config.d_model // self.config.n_heads
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        angles = positions_L.float()[:, None] * self.config.rope_theta**-exponents
        angles_LE = torch.cat((angles, angles), -1)
        return angles_LE.cos(), angles_LE.sin()


def initialise(model: TinyLLaDA) -> None:
    """Scaled normal weights; residual outputs small; the head starts as the embedding."""
    transformer = model.model.transformer
    nn.init.normal_(transformer.wte.weight, std=0.5)
    for name, weight in transformer.blocks.named_parameters():
        if weight.ndim == 2:
            std = weight.shape[1] ** -0.5
            residual = name.endswith(("attn_out.weight", "ff_out.weight"))
            nn.init.normal_(weight, std=std * (0.2 if residual else 1.0))
    with torch.no_grad():
        transformer.ff_out.weight.copy_(transformer.wte.weight * 0.1)
