"""all-MiniLM-L6-v2 against the formula of sentence-transformers in torch: mean of the tokens, length 1."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

from engine import LLM

TEXTS = [
    "The cat sits on the mat and looks at the birds outside.",
    "Invoice 4711 of 3 May is overdue; please pay 45,20 EUR.",
    "Ich weiß nicht, was soll es bedeuten. naïve café 日本語 👩‍👩‍👧",
    "short",
    "",
    "In 1969 two people walked on the moon while a third stayed in orbit. " * 8,
    "def f(x): return x**2  # [SEP] [MASK]",
]


def test_vectors_are_those_of_sentence_transformers_and_of_each_text_alone(minilm: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(minilm), AutoModel.from_pretrained(minilm).eval()
    with torch.inference_mode():
        batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
        mask = batch["attention_mask"][..., None]
        expected = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
        expected = torch.nn.functional.normalize(expected.double()).numpy()
    with LLM(str(minilm)) as llm:
        found = np.stack([each.vector for each in llm.embed(TEXTS)]).astype(np.float64)
        alone = np.stack([llm.embed(text)[0].vector for text in TEXTS])
        close, far = llm.score("a cat on a rug", [TEXTS[0], TEXTS[1]])
    assert ((found * expected).sum(1) / np.linalg.norm(found, axis=1)).min() > 1 - 1e-6
    assert np.abs(found - alone).max() < 1e-6
    assert close.score > 0.5 > far.score
