"""Samples of sound files."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError, MissingPackage

WIDTHS = {1: (np.uint8, 128.0, 128.0), 2: (np.int16, 0.0, 32768.0), 4: (np.int32, 0.0, 2147483648.0)}
"""By bytes of a sample: its type, the value of silence, and the largest amplitude."""


def read_audio(path: Path) -> tuple[np.ndarray, int]:
    """The samples of a file as one channel from -1 to 1, and the samples per second."""
    if not path.is_file():
        raise DataError(f"there is no sound file {path}")
    if path.suffix.lower() == ".wav":
        return _read_wav(path)
    try:
        import soundfile
    except ImportError:
        raise MissingPackage("soundfile", needed_for=f"{path}: sound files other than .wav") from None
    try:
        samples, rate = soundfile.read(str(path), dtype="float32", always_2d=True)
    except RuntimeError as error:  # libsndfile cannot read it
        raise DataError(f"{path} is not a readable sound file ({error}); replace or remove it") from None
    return _checked(samples.mean(axis=1), path), int(rate)


def _read_wav(path: Path) -> tuple[np.ndarray, int]:
    try:
        with wave.open(str(path), "rb") as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            content = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        reason = str(error) or "it ends too early"
        raise DataError(f"{path} is not a WAV file with integer samples ({reason}); convert it") from None
    if width not in WIDTHS:
        raise DataError(f"{path} has samples of {8 * width} bits; convert it to 16 bits")
    kind, zero, scale = WIDTHS[width]
    whole = len(content) - len(content) % (width * channels)
    values: Any = np.frombuffer(content[:whole], dtype=kind).astype(np.float32)
    return _checked(((values - zero) / scale).reshape(-1, channels).mean(axis=1), path), rate


def _checked(samples: np.ndarray, path: Path) -> np.ndarray:
    if not len(samples):
        raise DataError(f"{path} has no samples; replace or remove it")
    return samples
