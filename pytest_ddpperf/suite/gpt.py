"""A small GPT in plain torch: learned positions, pre-norm blocks, the token embedding tied to the head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    vocabulary: int = 1024
    context: int = 64  # tokens
    layers: int = 12
    heads: int = 4
    width: int = 128  # channels, a multiple of heads


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer of four times the width; both added to their input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def attention(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        query, key, value = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: Tensor = self.projection(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return attended

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        fed: Tensor = x + self.feed_forward(x)
        return fed


class GPT(nn.Module):
    """Token numbers (batch, tokens) to logits (batch, tokens, vocabulary)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config.width, config.heads) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)  # as GPT-2: a tied head needs small embeddings

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        return F.linear(self.norm(self.blocks(x)), self.token_embedding.weight)
