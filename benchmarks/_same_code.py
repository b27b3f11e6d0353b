"""Eight training steps. The time of most of them depends on what a process draws once: hash seed,
heap, layout.

Each function takes the amount of `work` and returns a step, which trains a DDP model as well. The
benchmark copies this file into a project, so it imports nothing of this folder.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

Step = Callable[[], object]


def _training(
    model: nn.Module,
    inputs: Callable[[], torch.Tensor],
    learning_rate: float = 0.01,
) -> Step:
    replica = DDP(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=learning_rate)

    def step() -> None:
        optimizer.zero_grad()
        replica(inputs()).square().mean().backward()
        optimizer.step()

    return step


def copies(work: float) -> Step:
    """A collate that copies samples: deepcopy of a row copies the storage of all rows, 512 KB."""
    samples = torch.randn(1024, 128)
    count = round(40 * work)

    def collate() -> torch.Tensor:
        return torch.stack(
            [copy.deepcopy(samples[row]) for row in range(count)]
        )

    return _training(nn.Linear(128, 64), collate)


def ordered(work: float) -> Step:
    """Waits as long as the place of a name among others in a hash table says."""
    x = torch.randn(64, 128)

    def inputs() -> torch.Tensor:
        time.sleep(work * 0.003 * (1 + hash("layer1") % 4))
        return x

    return _training(nn.Linear(128, 64), inputs)


def strings(work: float) -> Step:
    """Counts words, and writes and reads JSON: dictionaries and sets of strings, many small
    objects."""
    known = round(6_000 * work)
    words = [f"token-{number * 7919 % known}" for number in range(4 * known)]
    x = torch.randn(64, 128)

    def inputs() -> torch.Tensor:
        counts: dict[str, int] = {}
        for word in words:
            counts[word] = counts.get(word, 0) + 1
        names = {word.upper() for word in counts}
        read = json.loads(
            json.dumps(
                {
                    word: [count, word]
                    for word, count in counts.items()
                    if word.upper() in names
                }
            )
        )
        return x * (len(read) / known)

    return _training(nn.Linear(128, 64), inputs)


def activations(work: float) -> Step:
    """Large activations, each of 2 MB, which the allocator maps or takes from the heap, and gives
    back or keeps."""
    x = torch.randn(1024, 512)
    return _training(
        nn.Sequential(*(nn.PReLU() for _ in range(round(5 * work)))), lambda: x
    )


def small_tensors(work: float) -> Step:
    """Many small tensors, made anew in each step."""
    x = torch.randn(64, 128)
    count = round(1_500 * work)

    def inputs() -> torch.Tensor:
        rows = [x[row % 64] * 2.0 + row for row in range(count)]
        return torch.stack(rows)[:64] * 0.001

    return _training(nn.Linear(128, 64), inputs)


class _Images(Dataset[torch.Tensor]):
    def __init__(self, work: float) -> None:
        self._images = torch.randint(
            0, 255, (256, 3, 96, 96), dtype=torch.uint8
        )
        self._flips = round(40 * work)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        image = self._images[index % 256].float() / 255
        for _ in range(self._flips):
            image = image.flip(-1) * 0.99
        return image


def loading(work: float) -> Step:
    """A DataLoader that augments images in the process itself."""
    batches = iter(DataLoader(_Images(work), batch_size=16))
    model = nn.Sequential(
        nn.AvgPool2d(8), nn.Flatten(), nn.Linear(3 * 12 * 12, 16)
    )
    return _training(model, lambda: next(batches))


def gpt(work: float) -> Step:
    """A small transformer."""
    layer = nn.TransformerEncoderLayer(
        128, 4, 256, dropout=0.0, batch_first=True
    )
    model = nn.TransformerEncoder(
        layer, round(5 * work), enable_nested_tensor=False
    )
    x = torch.randn(2, 32, 128)
    return _training(model, lambda: x)


def convolutions(work: float) -> Step:
    """A small convolutional net, whose activations lie at the allocator's thresholds."""
    first = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU()]
    rest = [
        layer
        for _ in range(round(5 * work))
        for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
    ]
    x = torch.randn(16, 1, 32, 32)
    return _training(nn.Sequential(*first, *rest), lambda: x)


WORKLOADS: dict[str, Callable[[float], Step]] = {
    "copies": copies,
    "ordered": ordered,
    "strings": strings,
    "activations": activations,
    "small_tensors": small_tensors,
    "loading": loading,
    "gpt": gpt,
    "convolutions": convolutions,
}
