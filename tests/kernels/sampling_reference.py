"""Slow and obvious twin of `kernels.torch.sampling` and of the sampler's steps: a row at a time, numpy and float64.

What decides an order (edited logits, scores) is float32 as in the fast path, so that ties are the same ties;
probabilities and noise are float64.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

WORD_32 = 2**32 - 1
WORD_64 = 2**64 - 1


def gumbel_noise(seed: int, position: int, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Noise of one row; [K] float64 for K token ids."""
    return np.array([_gumbel_of_hash(_hash_token(seed, position, int(token_id))) for token_id in token_ids])


def edit_logits(
    logits: np.ndarray,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    *,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    allowed_token_ids: Sequence[int] | None = None,
    bad_words: Sequence[Sequence[int]] = (),
    end_ids: Sequence[int] = (),
    min_tokens: int = 0,
    mask: np.ndarray | None = None,
) -> np.ndarray:
    """The logits that the temperature sees.

    Args:
        logits: [V] float32.
        end_ids: forbidden while the output is shorter than min_tokens, unless the mask leaves nothing else.
        mask: [V] bool of the grammar, True = allowed; None: no grammar.

    Returns [V] float32, a new array.
    """
    edited = logits.astype(np.float32, copy=True)
    for token_id in set(prompt_ids) | set(output_ids):
        factor = np.float32(repetition_penalty)
        edited[token_id] = edited[token_id] / factor if edited[token_id] > 0 else edited[token_id] * factor
    for token_id in set(output_ids):
        edited[token_id] -= np.float32(list(output_ids).count(token_id)) * np.float32(frequency_penalty)
        edited[token_id] -= np.float32(presence_penalty)
    for token_id, bias in (logit_bias or {}).items():
        edited[token_id] += np.float32(bias)
    if allowed_token_ids is not None:
        edited[[token_id for token_id in range(len(edited)) if token_id not in allowed_token_ids]] = -np.inf
    for *prefix, last in bad_words:
        if not prefix or list(output_ids)[-len(prefix) :] == prefix:
            edited[last] = -np.inf
    if mask is not None:
        edited[~mask] = -np.inf
    if len(output_ids) < min_tokens:
        ended = edited.copy()
        ended[list(end_ids)] = -np.inf
        if mask is None or ended.max() > -np.inf:
            return ended
    return edited


def list_kept(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[int]:
    """Token ids that survive top-k, then top-p, then min-p; best first, ties by the lower id.

    Args:
        logits: [V] float32 with a finite maximum.
        temperature: above 0.
    """
    scores = scale_scores(logits, temperature)
    order = sorted(range(len(scores)), key=lambda token_id: (-scores[token_id], token_id))
    if top_k > 0:
        order = order[:top_k]
    weights = np.exp(scores.astype(np.float64))
    total = math.fsum(weights[order])
    kept: list[int] = []
    before = 0.0
    for token_id in order:
        beyond_p = top_p < 1.0 and before >= top_p * total
        if not kept or not (beyond_p or weights[token_id] < min_p):
            kept.append(token_id)
        before += weights[token_id]
    return kept


def compute_probabilities(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """What a draw's distribution must be; [V] float64. Args as in `list_kept`."""
    kept = list_kept(logits, temperature, top_k, top_p, min_p)
    weights = np.exp(scale_scores(logits, temperature).astype(np.float64))
    probabilities = np.zeros(len(logits))
    probabilities[kept] = weights[kept] / math.fsum(weights[kept])
    return probabilities


def rank_draws(
    logits: np.ndarray,
    seed: int,
    position: int,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> list[tuple[float, int]]:
    """(noisy score, token id) of every token that may be drawn, the drawn one first."""
    kept = list_kept(logits, temperature, top_k, top_p, min_p)
    noisy = scale_scores(logits, temperature)[kept] + gumbel_noise(seed, position, kept)
    return sorted(zip(noisy.tolist(), kept, strict=True), key=lambda entry: (-entry[0], entry[1]))


def scale_scores(logits: np.ndarray, temperature: float) -> np.ndarray:
    """(logits - maximum) / temperature in float32."""
    return (logits - logits.max()) / np.float32(temperature)


def compute_logprobs(logits: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """log_softmax in float64 over the allowed tokens; [V], -inf for the others."""
    shifted = logits.astype(np.float64) - logits.max()
    if mask is not None:
        shifted[~mask] = -np.inf
    return shifted - math.log(math.fsum(np.exp(shifted)))


def _hash_token(seed: int, position: int, token_id: int) -> int:
    golden = 0x9E3779B97F4A7C15
    key = _mix64(seed + golden)
    key = _mix64(key + position * golden)
    hashed = token_id ^ (key & WORD_32)
    hashed = (hashed ^ (hashed >> 17)) * 0xED5AD4BB + (key >> 32) & WORD_32
    hashed = (hashed ^ (hashed >> 11)) * 0xAC4C1B51 & WORD_32
    hashed = (hashed ^ (hashed >> 15)) * 0x31848BAB & WORD_32
    return (hashed ^ (hashed >> 14)) & (2**31 - 1)


def _mix64(state: int) -> int:
    state &= WORD_64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & WORD_64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & WORD_64
    return state ^ (state >> 31)


def _gumbel_of_hash(hashed: int) -> float:
    uniform = (hashed + 0.5) * (1 - 2**-24) * 2.0**-31
    return -math.log(-math.log1p(-uniform))
