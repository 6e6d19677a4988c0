"""Models for texts and images whose text part our decoder runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPart:
    """A model for texts and images whose text part alone is run; its weights are named `language_model.*`."""

    inert: frozenset[str]  # keys of the other parts
    ignored_weights: tuple[str, ...]


_IMAGE_WEIGHTS = ("vision_tower.", "multi_modal_projector.")
TEXT_PARTS: dict[str, TextPart] = {
    "gemma3": TextPart(
        frozenset(
            [
                *("vision_config", "mm_tokens_per_image", "image_token_index"),
                *("boi_token_index", "eoi_token_index"),
            ]
        ),
        _IMAGE_WEIGHTS,
    ),
    "mistral3": TextPart(
        frozenset(
            [
                *("vision_config", "image_token_index", "multimodal_projector_bias", "projector_hidden_act"),
                *("spatial_merge_size", "vision_feature_layer"),
            ]
        ),
        _IMAGE_WEIGHTS,
    ),
}
