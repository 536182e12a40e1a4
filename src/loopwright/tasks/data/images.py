"""Images of a folder: one folder for each class; files are read when they are used."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ArgumentsError, DataError, MissingPackage, ModelError
from ..request import Request
from .readers import missing_file

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
FILE = "preprocessor_config.json"
LARGEST_16 = 65535
"""The largest value of 16 bits."""


@dataclass(frozen=True)
class ImageTransform:
    """Resizes an image and normalizes its channels; saved with the model in transformers' format."""

    height: int
    width: int
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __call__(self, path: Path) -> np.ndarray:
        from PIL import Image

        try:
            with Image.open(path) as file:
                image = _in_8_bits(_upright(file)).convert("RGB" if len(self.mean) == 3 else "L")
                image = image.resize((self.width, self.height), Image.Resampling.BILINEAR)
                pixels: Any = np.asarray(image, dtype=np.float32) / 255
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # Pillow's, by format
            reason = str(error).replace(f" {str(path)!r}", "")
            raise DataError(f"{path} is not a readable image ({reason}); replace or remove it") from None
        pixels = pixels.reshape(self.height, self.width, len(self.mean))
        scaled = (pixels - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        return np.ascontiguousarray(scaled.transpose(2, 0, 1))

    def save_pretrained(self, folder: str, **kwargs: Any) -> None:
        """Write the values into a folder, as an image processor of transformers does."""
        values = {
            "do_resize": True,
            "size": {"height": self.height, "width": self.width},
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
            "resample": 2,
        }
        Path(folder, FILE).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _upright(image: Any) -> Any:
    """The image as it is shown, and as transformers loads it: cameras store beside the pixels how they are rotated."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def _in_8_bits(image: Any) -> Any:
    """The image with 8 bits a channel; Pillow itself would set everything above 255 to white."""
    from PIL import Image

    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, whose range is unknown")
    if image.mode != "I" and not image.mode.startswith("I;16"):
        return image
    return Image.fromarray((np.asarray(image).astype(np.int64).clip(0, LARGEST_16) >> 8).astype(np.uint8))


@dataclass(frozen=True)
class Images:
    """Samples of images and classes."""

    files: Sequence[Path]
    labels: Sequence[int]
    transform: ImageTransform
    input_name: str = "pixel_values"

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {self.input_name: self.transform(self.files[index]), "labels": self.labels[index]}


def image_files(folder: Path, place: str) -> dict[str, list[Path]]:
    """The image files of each class, sorted."""
    if not folder.exists():
        raise missing_file(place, str(folder))
    if not folder.is_dir():
        raise ArgumentsError(f"{place}={str(folder)!r} is a file; it must be a folder with one folder for each class")
    _check_pillow(place)
    found = {
        each.name: sorted(
            file for file in each.rglob("*") if file.suffix.lower() in ENDINGS and not file.name.startswith(".")
        )
        for each in sorted(folder.iterdir())
        if each.is_dir() and not each.name.startswith(".")
    }
    empty = [name for name, files in found.items() if not files]
    if not found or empty:
        what = f"the class {empty[0]!r} has no image" if empty else "there are no folders in it"
        raise DataError(f"{place}: {folder}: {what}; put images ({', '.join(ENDINGS)}) into one folder for each class")
    return found


def _check_pillow(place: str) -> None:
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise MissingPackage("pillow", needed_for=f"{place}: images") from None


def transform_for(request: Request, config: Any) -> ImageTransform:
    """The transform that a model expects: that of its folder, or the size of its configuration."""
    name = str(request.model.tokenizer or request.model.name)
    try:
        return _transform(_saved_values(name), config, request.data.image_size)
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"{Path(name, FILE)} cannot be used ({error}); correct it, or remove it") from None


def _transform(values: dict[str, Any], config: Any, asked: int | None) -> ImageTransform:
    size: Any = values.get("size") or getattr(config, "image_size", None) or 224
    if isinstance(size, dict):
        size = (size.get("height") or size.get("shortest_edge"), size.get("width") or size.get("shortest_edge"))
    elif not isinstance(size, (list, tuple)):
        size = (size, size)
    if asked is not None:
        size = (asked, asked)
    channels = int(getattr(config, "num_channels", None) or 3)
    mean = tuple(values.get("image_mean") or [0.5] * channels)
    std = tuple(values.get("image_std") or [0.5] * channels)
    return ImageTransform(int(size[0]), int(size[1]), mean, std)


def _saved_values(name: str) -> dict[str, Any]:
    path: Any = Path(name, FILE)
    if not path.is_file() and not Path(name).exists() and ":" not in name:
        from transformers.utils import cached_file

        try:
            path = cached_file(name, FILE)
        except OSError:  # the model has none
            return {}
    if path is None or not Path(path).is_file():
        return {}
    values: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return values
