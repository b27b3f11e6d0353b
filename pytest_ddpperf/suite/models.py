"""A small GPT, ResNets and ResNeXts in plain torch.

The GPT has learned positions, pre-norm blocks, and the token embedding tied to the head. The
ResNets are of He et al. 2015 in the v1.5 form (the stride is in the 3x3 convolution), the ResNeXts
of Xie et al. 2016. They have the same layers and as many parameters as torchvision's models of
these names, and take images of 32x32 pixels or more.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# --- GPT


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    vocabulary: int = 1024
    context: int = 64  # tokens
    layers: int = 12
    heads: int = 4
    width: int = 128  # channels, a multiple of heads


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer of four times the width; both added to their
    input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def attention(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        query, key, value = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(
                1, 2
            )
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        return self.projection(
            mixed.transpose(1, 2).reshape(batch, tokens, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(x)


class GPT(nn.Module):
    """Token numbers (batch, tokens) to logits (batch, tokens, vocabulary)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(
            *(Block(config.width, config.heads) for _ in range(config.layers))
        )
        self.norm = nn.LayerNorm(config.width)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                # as GPT-2: a tied head needs small embeddings
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        return F.linear(self.norm(self.blocks(x)), self.token_embedding.weight)


# --- ResNet


def conv_norm(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    """A convolution that keeps the size (up to its stride), with batch normalisation in place of a
    bias."""
    conv = nn.Conv2d(
        inputs,
        outputs,
        kernel,
        stride,
        padding=kernel // 2,
        groups=groups,
        bias=False,
    )
    return [conv, nn.BatchNorm2d(outputs)]


class Bottleneck(nn.Module):
    """1x1 down to `width` channels, 3x3 in `groups`, 1x1 up to `outputs` channels, added to the
    input."""

    def __init__(
        self, inputs: int, width: int, outputs: int, stride: int, groups: int
    ) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *conv_norm(inputs, width, 1),
            nn.ReLU(inplace=True),
            *conv_norm(width, width, 3, stride, groups),
            nn.ReLU(inplace=True),
            *conv_norm(width, outputs, 1),
        )
        same_shape = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity()
            if same_shape
            else nn.Sequential(*conv_norm(inputs, outputs, 1, stride))
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.residual(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Images (batch, 3, height, width) to logits (batch, 1000).

    `depths` are the numbers of blocks per stage. The 3x3 convolutions of a ResNeXt have 32
    `groups`, of `group_width` channels in the first stage.
    """

    def __init__(
        self, depths: Sequence[int], groups: int = 1, group_width: int = 64
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *conv_norm(3, 64, 7, stride=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks: list[nn.Module] = []
        channels = 64
        for stage, depth in enumerate(depths):
            for index in range(depth):
                stride = 2 if stage and not index else 1
                width = groups * group_width << stage
                outputs = 256 << stage
                blocks.append(
                    Bottleneck(channels, width, outputs, stride, groups)
                )
                channels = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(
                    module.weight, mode="fan_out", nonlinearity="relu"
                )

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)))


RESNETS: Mapping[str, Callable[[], ResNet]] = {
    "resnet50": partial(ResNet, (3, 4, 6, 3)),
    "resnet101": partial(ResNet, (3, 4, 23, 3)),
    "resnext50_32x4d": partial(ResNet, (3, 4, 6, 3), groups=32, group_width=4),
    "resnext101_32x8d": partial(
        ResNet, (3, 4, 23, 3), groups=32, group_width=8
    ),
}
