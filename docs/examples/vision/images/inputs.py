"""What one step reads: images as they were uploaded, and what each client asks of its own."""

import torch

from slotgraph import BATCH, Axis, Inputs, copied

EDGE = Axis("EDGE", fixed=True)  # pixels of an uploaded image's edge
ROOM = Axis("ROOM", fixed=True)  # how far the crop may begin from the image's corner
CLASSES = Axis("CLASSES", fixed=True)


class ImageInputs(Inputs):
    """A row of BATCH is an image. Padded rows are black images, which the step classifies like any others.

    Attributes:
        pixels: The uploaded image, red, green and blue.
        corner: Where the crop begins, row and column. In uint8 it cannot be negative.
        allowed: The classes that the client asks about. Padding allows all: with none, the scores would be nan.
        index_row: Where the embedding is kept. Row 0 is nobody's: padding writes there.
    """

    pixels: torch.Tensor = copied(BATCH, EDGE, EDGE, 3, dtype=torch.uint8, pad=0)
    corner: torch.Tensor = copied(BATCH, 2, dtype=torch.uint8, pad=0, limit=ROOM)
    allowed: torch.Tensor = copied(BATCH, CLASSES, dtype=torch.bool, pad=True)
    index_row: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
