"""The batch queue: images arrive one by one, run in batches, and each answer goes to the future of its image."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Self

import attrs
import numpy as np
import torch

from images.model import Labels
from slotgraph.errors import BatchError

Batch = dict[str, Any]
Answer = tuple[int, float]


@attrs.define(eq=False, kw_only=True)
class Image:
    """An image on its way: what the step reads of it, the future of its label and score, and when they came."""

    pixels: np.ndarray[Any, Any]
    corner: list[int]
    allowed: np.ndarray[Any, Any]
    index_row: int
    future: Future[Answer] = attrs.field(factory=Future)
    answered: float = 0.0

    def again(self, **changes: Any) -> "Image":
        """The same image for another question."""
        return attrs.evolve(self, future=Future(), **changes)


def batch_of(images: Sequence[Image]) -> Batch:
    """The images as a batch of the host, by the names of the declaration. Lists get the dtype of their slot."""
    return {
        "pixels": np.stack([image.pixels for image in images]),
        "corner": [image.corner for image in images],
        "allowed": np.stack([image.allowed for image in images]),
        "index_row": [image.index_row for image in images],
    }


class Service(threading.Thread):
    """Runs what is in its queue: as soon as `most` images are there, or `wait` seconds after the first of them."""

    def __init__(self, run: Callable[[Batch], Labels], most: int, wait: float) -> None:
        super().__init__(daemon=True)
        self._run, self._most, self._wait = run, most, wait
        self._queue = queue.SimpleQueue[Image | None]()

    def submit(self, image: Image) -> Future[Answer]:
        """Hand in an image, from any thread."""
        self._queue.put(image)
        return image.future

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Answer what is in the queue, then stop."""
        self._queue.put(None)
        self.join()

    @torch.inference_mode()
    def run(self) -> None:
        """Gather a batch and answer it, until the service is left."""
        for first in iter(self._queue.get, None):
            self._answer(self._gathered(first))

    def _gathered(self, first: Image) -> list[Image]:
        images, deadline = [first], time.monotonic() + self._wait
        while len(images) < self._most:
            try:
                image = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if image is None:
                self._queue.put(None)  # for `run`, once these are answered
                break
            images.append(image)
        return images

    def _answer(self, images: Sequence[Image]) -> None:
        """Run a batch. If it is refused, run each image alone, so that only the one at fault fails."""
        try:
            labels = self._run(batch_of(images))
        except Exception as error:  # noqa: BLE001 - whatever it is, the clients must hear of it
            for image in images:
                if isinstance(error, BatchError) and len(images) > 1:
                    self._answer([image])
                else:
                    image.future.set_exception(error)
            return
        rows = zip(*(column.tolist() for column in labels), strict=True)  # the next step overwrites the outputs
        for image, row in zip(images, rows, strict=True):
            image.answered = time.monotonic()
            image.future.set_result(row)
