"""`python -m app models`: families, and a report or a refusal for one checkpoint before anything is loaded."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from app.cli.main import main
from tests.engine.embedding_folders import make_embedding_folder
from tests.engine.model.drive import make_transformers_model, save
from tests.engine.model.fallback_families import make_config, write_checkpoint
from tests.engine.vision_folders import make_qwen_vl_folder


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["models", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_it_lists_models_with_their_state(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    code, out, _ = run(capsys, "--models-dir", str(tmp_path))
    rows = {line.split()[0]: line.split()[1] for line in out.splitlines()}
    assert code == 0 and (rows["demo_model"], rows["broken.gguf"]) == ("here", "broken")
    assert "smollm2" in rows and "broken.gguf: " in out


def test_what_cannot_be_done_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code, message in (
        (("fetch", "foo"), 1, "known are smollm2"), (("remove", "demo_model"), 1, "belongs to Troupe"),
        (("fetch",), 2, "takes the name of a model"), (("families", "x"), 2, "takes no model"),
    ):
        found, _, err = run(capsys, *arguments)
        assert found == code and message in err


def test_it_lists_the_families(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "families")
    assert code == 0
    assert "Qwen3ForCausalLM" in out and "qwen3" in out
    runs = dict(line.split(maxsplit=1) for line in out.splitlines() if line.endswith(("images", "text only")))
    assert runs["qwen2_5_vl"] == "text and images" and runs["qwen3_5"] == "text only"
    assert "Other decoder-only models run on the code of transformers" in out


def test_a_report_counts_memory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = make_transformers_model("mistral", sliding_window=32).to(torch.bfloat16)
    save(model, tmp_path)
    code, out, _ = run(capsys, str(tmp_path))
    facts = dict(line.split(maxsplit=1) for line in out.splitlines() if not line.startswith("KV"))
    assert code == 0
    assert facts["architecture"] == "MistralForCausalLM, run by troupe's decoder"
    num_parameters = sum(each.numel() for each in model.parameters())
    assert facts["parameters"].startswith(f"{num_parameters:,} in 3 layers")
    assert facts["weights"] == f"{num_parameters * 2 / 1024:.1f} KiB as bfloat16"
    # 3 layers x (key, value) x 2 heads x 16 x 2
    assert "KV cache      384 bytes per token as bfloat16, 0 bytes of a token outside the windows\n" in out
    assert facts["attention"] == "3 layers over 32 tokens"
    assert facts["embeddings"].startswith("none")


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (lambda folder: make_qwen_vl_folder(folder, "qwen2_5_vl"), "seen; transformers' code encodes them"),
        (lambda folder: write_checkpoint(make_config("nemotron"), folder), "LM, run by the code of transformers"),
        # its tensors are stored without the prefix of the model with a head
        (make_embedding_folder, "embeddings    last token"),
    ],
)
def test_a_report_says_how_a_model_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, make: Callable[[Path], object], fact: str
) -> None:
    make(tmp_path)
    code, out, _ = run(capsys, str(tmp_path))
    assert code == 0 and fact in out
