"""ImageEncoder: runs the vision tower of a checkpoint, for one image at a time."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from engine.errors import ConfigError
from engine.model.checkpoint import read_json_object, read_tensors, resolve_checkpoint, weight_files
from engine.model.vision.spec import VisionSpec

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")  # the second one contains the first
# Values of transformers' image processors that leave one out.
_DEFAULT_MEAN = _DEFAULT_STD = (0.5, 0.5, 0.5)
_MAX_NAMES = 8


class ImageEncoder:
    """The tower and the normalisation of pixels. One thread calls `encode`; steps run meanwhile.

    Args:
        seed: draw random weights instead of reading any.

    Raises:
        ConfigError: the tensors do not match the config.
    """

    def __init__(
        self, path_or_name: str | Path, spec: VisionSpec, dtype: torch.dtype, device: torch.device,
        seed: int | None = None,
    ) -> None:
        # By name, because importing transformers' models takes seconds.
        kind = importlib.import_module(f"engine.model.vision.{spec.kind}")
        data = json.loads(spec.config)
        with no_init_weights():
            self.tower: nn.Module = kind.Tower(
                transformers.CONFIG_MAPPING[data["model_type"]].from_dict(data)
            )
        self.tower.eval().requires_grad_(False)
        self._dtype = dtype
        self._device = device
        # Steps run on another stream of the device.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        folder = resolve_checkpoint(path_or_name, PROCESSOR_FILES)
        self._scale, self._mean, self._std = _read_normalisation(folder)
        if seed is not None:
            self._fill(seed)
        else:
            self._load(folder, spec.weight_prefix)
        self.tower.to(device)

    @torch.inference_mode()
    def encode(self, pixels: np.ndarray, grid: Sequence[int]) -> np.ndarray:
        """Return the features of one image, [n, D] float32; they do not depend on other images."""
        stream: Any = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with stream:
            features: Tensor = self.tower(self._normalise(torch.from_numpy(pixels.copy())), grid)
            return features.float().cpu().numpy()  # type: ignore[no-any-return]

    def _normalise(self, pixels: Tensor) -> Tensor:
        shape = (3, *[1] * (pixels.dim() - 2))
        scaled = (pixels.double() * self._scale).float().to(self._device)  # MPS has no float64
        normal = (scaled - self._mean.view(shape).to(self._device)) / self._std.view(shape).to(self._device)
        return normal.to(self._dtype)

    def _load(self, folder: Path, prefix: str) -> None:
        own = dict(self.tower.named_parameters())
        parts = tuple(f"{prefix}{name}." for name, _ in self.tower.named_children())
        unexpected = []
        for name, tensor in read_tensors(weight_files(folder), parts):
            # Older files have the encoder as a part of the tower.
            inner = name.removeprefix(prefix).replace("vision_tower.vision_model.", "vision_tower.")
            parameter = own.pop(inner, None)
            if parameter is None or parameter.shape != tensor.shape:
                unexpected.append(name)
            else:
                parameter.data = tensor.to(self._dtype)
        if own or unexpected:
            missing = [prefix + name for name in own]
            raise ConfigError(
                f"the tensors of {folder} do not match its vision config: missing: {missing[:_MAX_NAMES]}; "
                f"unexpected, or of another shape: {unexpected[:_MAX_NAMES]}"
            )

    def _fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.tower.parameters():
            parameter.data = parameter.normal_(0.0, 0.02, generator=generator).to(self._dtype)


def read_processor(folder: Path) -> dict[str, Any]:
    """Return the settings of the image processor."""
    for path in (folder / name for name in PROCESSOR_FILES):
        if path.is_file():
            data = read_json_object(path)
            return data["image_processor"] if isinstance(data.get("image_processor"), dict) else data
    raise ConfigError(f"{folder} has no {PROCESSOR_FILES[0]}, which says how images are prepared")


def _read_normalisation(folder: Path) -> tuple[float, Tensor, Tensor]:
    """Return scale, mean and standard deviation of the image processor."""
    data = read_processor(folder)
    try:
        scale = float(data.get("rescale_factor", 1 / 255)) if data.get("do_rescale", True) else 1.0
        is_normal = data.get("do_normalize", True)
        mean = torch.tensor(data.get("image_mean") or _DEFAULT_MEAN if is_normal else [0.0] * 3)
        std = torch.tensor(data.get("image_std") or _DEFAULT_STD if is_normal else [1.0] * 3)
        if mean.shape != (3,) or std.shape != (3,):
            raise ValueError("image_mean and image_std must have 3 numbers")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{folder}: image processor: {error}") from error
    return scale, mean, std
