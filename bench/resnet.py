"""A small implementation of ResNet with bottlenecks, channels last, for whole training steps.

Blocks 3, 4, 6, 3 and width 64 give ResNet-50.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Output channels of a bottleneck over its inner channels.
EXPANSION = 4


def convolution(given: int, made: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(given, made, size, stride, size // 2, bias=False), nn.BatchNorm2d(made))


class Bottleneck(nn.Module):
    def __init__(self, given: int, middle: int, stride: int) -> None:
        super().__init__()
        self.reduce = convolution(given, middle, 1)
        self.look = convolution(middle, middle, 3, stride)
        self.expand = convolution(middle, EXPANSION * middle, 1)
        same = stride == 1 and given == EXPANSION * middle
        self.past = nn.Identity() if same else convolution(given, EXPANSION * middle, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        seen = F.relu(self.look(F.relu(self.reduce(x), inplace=True)), inplace=True)
        return F.relu(self.expand(seen) + self.past(x), inplace=True)


class ResNet(nn.Module):
    def __init__(self, blocks: Sequence[int], width: int, classes: int) -> None:
        super().__init__()
        self.stem = convolution(3, width, 7, 2)
        layers: list[nn.Module] = []
        given = width
        for stage, count in enumerate(blocks):
            for number in range(count):
                stride = 2 if stage > 0 and number == 0 else 1
                layers.append(Bottleneck(given, width << stage, stride))
                given = EXPANSION * (width << stage)
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(given, classes)
        self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy; ``images`` is [batch, 3, height, width]."""
        x = F.max_pool2d(F.relu(self.stem(images), inplace=True), 3, 2, 1)
        return F.cross_entropy(self.head(self.blocks(x).mean((2, 3))), labels)


def pictures(batch: int, size: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return random images and labels."""
    images = torch.randn(batch, 3, size, size).contiguous(memory_format=torch.channels_last)
    return images, torch.randint(classes, (batch,))
