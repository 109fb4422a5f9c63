"""Real text that every machine has: the source of Python's own standard library, as bytes."""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from language_model.config import ConfigError

Bytes = npt.NDArray[np.uint8]
Starts = npt.NDArray[np.int64]
VOCABULARY = 256
HELD_OUT_EVERY = 10
LEAST_HELD_OUT_BYTES = 20_000


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The text, split by file: no held-out line has a neighbour in the training text.

    Attributes:
      train: training bytes.
      validation: held-out bytes.
      train_files: number of files in the training text.
      validation_files: number of files held out.
    """

    train: Bytes
    validation: Bytes
    train_files: int
    validation_files: int

    def unigram_bits(self) -> float:
        """Bits per held-out byte of a model that knows only how often each byte occurs."""
        counts = np.bincount(self.train, minlength=VOCABULARY) + 1
        return float(-np.log2(counts / counts.sum())[self.validation].mean())


def load_corpus(max_train_bytes: int) -> Corpus:
    """Reads the standard library's top-level modules, at most `max_train_bytes` to train on.

    The order is that of the hashed names: the same everywhere, and unlike the alphabet it spreads
    similar modules over both sides of the split.

    Raises:
      ConfigError: if this Python comes without its source.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"), key=lambda f: hashlib.sha256(f.name.encode()).digest())
    if len(files) < HELD_OUT_EVERY:
        raise ConfigError(
            f"the text is Python's standard library, but {folder} holds {len(files)} .py files; "
            "use a Python that is installed with its source"
        )
    train = _join([f for i, f in enumerate(files) if i % HELD_OUT_EVERY], max_train_bytes)
    held_out_bytes = max(max_train_bytes // HELD_OUT_EVERY, LEAST_HELD_OUT_BYTES)
    validation = _join(files[::HELD_OUT_EVERY], held_out_bytes)
    return Corpus(train[0], validation[0], train[1], validation[1])


def _join(files: list[Path], limit: int) -> tuple[Bytes, int]:
    """Concatenates files, a zero byte after each, until the limit: the bytes and how many files."""
    text = bytearray()
    used = 0
    for file in files:
        if len(text) >= limit:
            break
        text += file.read_bytes() + b"\0"
        used += 1
    return np.frombuffer(bytes(text[:limit]), np.uint8), used


def evaluation_batches(text: Bytes, window: int, batch: int, count: int) -> list[Starts]:
    """Where the windows of `count` fixed batches start, spread evenly over the text.

    Raises:
      ConfigError: if the text is shorter than a window.
    """
    if len(text) < window + 1:
        raise ConfigError(
            f"--window must be less than the {len(text)} bytes of held-out text, got {window}; "
            "a larger --corpus-bytes gives more"
        )
    starts = np.linspace(0, len(text) - window - 1, count * batch).astype(np.int64)
    return list(starts.reshape(count, batch))


def windows(text: Bytes, starts: Starts, window: int) -> Bytes:
    """One byte more than the window: inputs and targets overlap in all but one."""
    return text[starts[:, None] + np.arange(window + 1)]


class Batches:
    """Endless batches of windows: each epoch cuts the text at a new offset, in a new order.

    Every process goes through the same order, and reads only the windows of its own devices.

    Its place is two plain values, so a checkpoint can hold it.
    """

    def __init__(self, text: Bytes, window: int, batch: int, seed: int) -> None:
        """Starts the first epoch.

        Raises:
          ConfigError: if the text is too short for one batch.
        """
        if len(text) < window * (batch + 1) + 1:
            raise ConfigError(
                f"--corpus-bytes must be at least {window * (batch + 1) + 1}, one batch of "
                f"--batch {batch} windows of --window {window} bytes, got {len(text)} bytes of text"
            )
        self._text, self._window, self._batch = text, window, batch
        self._rng = np.random.default_rng(seed)
        self._start_epoch()

    def _start_epoch(self) -> None:
        self._rng_at_epoch = self._rng.bit_generator.state
        offset = int(self._rng.integers(self._window))
        count = (len(self._text) - 1 - offset) // self._window
        self._starts = offset + self._window * self._rng.permutation(count)
        self._position = 0

    def next(self) -> Starts:
        """Where the windows of the next batch start: int64 [batch]."""
        if self._position + self._batch > len(self._starts):
            self._start_epoch()
        starts = self._starts[self._position : self._position + self._batch]
        self._position += self._batch
        return starts

    def place(self) -> dict[str, Any]:
        """Where the data stands, as JSON: the generator before this epoch, and the windows read."""
        return {"rng": self._rng_at_epoch, "position": self._position}

    def go_to(self, place: dict[str, Any]) -> None:
        """Goes back to a place that `place` gave."""
        self._rng.bit_generator.state = place["rng"]
        self._start_epoch()
        self._position = place["position"]
