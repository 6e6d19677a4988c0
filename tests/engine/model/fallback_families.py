"""Which model types of transformers run on the transformers backend: `python -m tests.engine.model.fallback_families`.

Each generative config class writes a tiny random checkpoint, which is then loaded and compared with transformers.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.errors import ConfigError
from engine.model import load_model, read_model_config
from engine.model.transformers_backend.leak_probe import compare_models, randomise
from engine.model.transformers_backend.model import TransformersModel, make_model
from engine.model.transformers_backend.tiny_config import shrink_config

TOLERANCE = 1e-4
FAILURES = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ImportError, AssertionError)
FAILURES += (StrictDataclassError,)
MROPE = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}
# Keys that every real checkpoint of these types has, and the defaults of the class lack.
REQUIRED: dict[str, dict[str, object]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "nemotron": {"num_key_value_heads": 8},
    **{
        name: {"rope_parameters": MROPE}
        for name in ("qwen2_vl", "qwen2_5_vl", "glm4v", "glm46v", "glmga", "paddleocr_vl", "qwen2_5_omni_thinker")
    },
    **{name: {"rope_parameters": {**MROPE, "partial_rotary_factor": 0.5}} for name in ("glm4v_moe", "glm_ocr")},
}


def list_model_types() -> list[str]:
    """Return the model types with a causal head over text, or over text among other inputs."""
    names = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    return list(dict.fromkeys(name for mapping in names for name in mapping))


def make_config(model_type: str) -> PreTrainedConfig:
    """Return the default config of a type, shrunk; types that may be encoders become decoders."""
    config = CONFIG_MAPPING[model_type]()
    text = config.get_text_config()
    for key, value in REQUIRED.get(model_type, {}).items():
        setattr(text, key, value)
    if text is config and getattr(config, "is_decoder", True) is False and not config.is_encoder_decoder:
        config.is_decoder = True
    return shrink_config(config)


def write_checkpoint(config: PreTrainedConfig, folder: Path) -> transformers.PreTrainedModel:
    """Save a tiny random model; returns it as the reference, with transformers' own attention."""
    torch.manual_seed(1)
    reference = make_model(config, "eager").requires_grad_(False)
    randomise(reference)
    reference.save_pretrained(folder)
    return reference


def measure(config: PreTrainedConfig, folder: Path) -> tuple[float, str]:
    """Return the largest difference of logits between transformers and the loaded checkpoint, and where it is."""
    reference = write_checkpoint(config, folder)
    model = load_model(folder, config=read_model_config(folder, "transformers"))
    assert isinstance(model, TransformersModel)
    return compare_models(reference, model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_types", nargs="*", help="default: all")
    names = parser.parse_args().model_types or list_model_types()
    transformers.logging.set_verbosity_error()
    num_running = 0
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                gap, place = measure(make_config(name), Path(folder))
                is_right = gap <= TOLERANCE
                said = f"{gap:.1e} ({place})"
            except ConfigError as error:
                is_right, said = False, str(error).partition(": ")[2]
            except FAILURES as error:  # a config class that cannot be shrunk or saved
                is_right, said = False, f"{type(error).__name__}: {error}"
        num_running += is_right
        print(f"{'runs' if is_right else 'no  '} {name:28} {said[:160]!r}", flush=True)
    print(f"{num_running} of {len(names)} model types run")


if __name__ == "__main__":
    main()
