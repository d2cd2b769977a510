"""A small vision transformer with seeded weights. Its forward is the step."""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from images.inputs import ImageInputs

CROP, PATCH, WIDTH, HEADS, LAYERS = 64, 8, 128, 4, 4


class Labels(NamedTuple):
    """The label of each image, and the label's score."""

    label: torch.Tensor
    score: torch.Tensor


class Layer(nn.Module):
    """Attention over the patches of an image, then a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        wide = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        self.perceptron = nn.Sequential(nn.LayerNorm(WIDTH), *wide)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of [images, patches, WIDTH]."""
        query, key, value = self.qkv(self.norm(hidden)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        hidden = hidden + self.out(scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        out: torch.Tensor = hidden + self.perceptron(hidden)
        return out


class Classifier(nn.Module):
    """Crops, embeds and classifies images, and keeps each embedding in an index of so many rows."""

    index: torch.Tensor

    def __init__(self, classes: int, rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)), nn.LayerNorm(WIDTH))
        self.patches, self.head = nn.Linear(3 * PATCH * PATCH, WIDTH), nn.Linear(WIDTH, classes)
        nn.init.normal_(self.head.weight)  # so large that images get different labels
        self.places = nn.Parameter(torch.randn((CROP // PATCH) ** 2, WIDTH))
        self.register_buffer("index", torch.zeros(rows, WIDTH))

    def forward(self, view: ImageInputs) -> Labels:
        """The step: the same code for a batch, for a padded bucket, and for one image alone."""
        image = cropped(view.pixels, view.corner.long()) / 127.5 - 1
        patches = image.unflatten(1, (-1, PATCH)).unflatten(3, (-1, PATCH)).transpose(2, 3).flatten(3).flatten(1, 2)
        embedding = self.layers(self.patches(patches) + self.places).mean(1)
        self.index[view.index_row] = embedding
        score, label = self.head(embedding).masked_fill(~view.allowed, -torch.inf).softmax(-1).max(-1)
        return Labels(label, score)


def cropped(pixels: torch.Tensor, corner: torch.Tensor) -> torch.Tensor:
    """Each image's own square of CROP pixels, [images, CROP, CROP, 3]."""
    images, reach = (torch.arange(size, device=pixels.device) for size in (len(pixels), CROP))
    rows, columns = (corner[:, :, None] + reach).unbind(1)
    return pixels[images[:, None, None], rows[:, :, None], columns[:, None, :]]
