"""A byte-level transformer whose feed-forward layers are mixtures of experts built from `te_offload.ops`.

In: bytes, (batch, context) int64. Out: the mean cross entropy of the next byte. Keeps true: every token goes to its top
k experts, none is dropped; all operations have deterministic backwards. Does not: balance the experts' load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch.nn import functional

from te_offload import ops
from te_offload.slots import SlotName


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model.

    Attributes:
        dim: width. layers: number of transformer layers. heads: attention heads.
        experts, top_k, ffn: experts a layer, experts a token, width inside an expert.
        context: bytes a sample.
        rows: of which each expert's number of tokens is made a multiple, by tokens of zeros.
        keep: slots whose op gets ``no_offload_activation=True``. recompute_act_input: of the activations.
    """

    dim: int = 128
    layers: int = 4
    heads: int = 4
    experts: int = 8
    top_k: int = 2
    ffn: int = 256
    context: int = 128
    rows: int = 1
    keep: frozenset[SlotName] = frozenset()
    recompute_act_input: bool = False


class Attention(torch.nn.Module):
    """Causal self-attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = torch.nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.proj = torch.nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, context, dim) to the same shape."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: torch.Tensor = self.proj(mixed.transpose(1, 2).flatten(-2))
        return y


class MoE(torch.nn.Module):
    """Router, top-k choice, grouped MLP."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.router = torch.nn.Linear(config.dim, config.experts, bias=False)
        size: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.mlp = te.ops.Sequential(
            ops.GroupedLinear(
                config.experts,
                config.dim,
                config.ffn,
                no_offload_activation=SlotName.FC1_INPUT in config.keep,
                **size,
            ),
            ops.ScaledSReLU(
                no_offload_activation=SlotName.ACT_INPUT in config.keep,
                recompute_act_input=config.recompute_act_input,
            ),
            ops.GroupedLinear(
                config.experts,
                config.ffn,
                config.dim,
                no_offload_activation=SlotName.FC2_INPUT in config.keep,
                **size,
            ),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, context, dim) to the same shape."""
        tokens = x.flatten(0, 1)
        probabilities = torch.softmax(self.router(tokens).float(), dim=-1)
        weights, experts = probabilities.topk(self.config.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = experts.flatten().argsort(stable=True)
        splits = torch.bincount(experts.flatten(), minlength=self.config.experts)
        rows = tokens[order // self.config.top_k]
        scales = weights.flatten()[order].to(x.dtype)
        if self.config.rows > 1:
            splits, places = _padded(splits, self.config.rows)
            total = int(splits.sum())
            rows = rows.new_zeros(total, rows.shape[1]).index_copy(0, places, rows)
            scales = scales.new_zeros(total).index_copy(0, places, scales)
            y = self.mlp(rows, splits, scales, splits)[places]
        else:
            y = self.mlp(rows, splits, scales, splits)
        mixed: torch.Tensor = y[order.argsort()].unflatten(0, (-1, self.config.top_k)).sum(1)
        return mixed.view_as(x)


def _padded(splits: torch.Tensor, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split sizes rounded up, and where each row of before is then."""
    larger = (splits + multiple - 1) // multiple * multiple
    shifts = (larger - splits).cumsum(0) - (larger - splits)
    return larger, torch.arange(int(splits.sum()), device=splits.device) + shifts.repeat_interleave(splits)


class Layer(torch.nn.Module):
    """Attention and a mixture of experts, each behind a norm and beside a residual."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm1 = torch.nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.norm2 = torch.nn.RMSNorm(config.dim)
        self.moe = MoE(config, device, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, context, dim) to the same shape."""
        x = x + self.attention(self.norm1(x))
        y: torch.Tensor = x + self.moe(self.norm2(x))
        return y


class ByteModel(torch.nn.Module):
    """The whole model.

    Args:
        config: its sizes. device, dtype: of its parameters.
    """

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, config.dim)
        self.position = torch.nn.Parameter(torch.randn(config.context, config.dim, device="cpu") * 0.02)
        self.layers = torch.nn.ModuleList(Layer(config, device, dtype) for _ in range(config.layers))
        self.norm = torch.nn.RMSNorm(config.dim)
        self.head = torch.nn.Linear(config.dim, 256, bias=False)
        self.to(device=device, dtype=dtype)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of each next byte of (batch, context + 1) int64, in nats."""
        x = self.embedding(text[:, :-1]) + self.position[: text.shape[1] - 1]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
