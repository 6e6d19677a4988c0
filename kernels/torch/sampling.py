"""Drawing tokens from logits: counter-based Gumbel noise, exact candidates and filters, token masks.

Masks are int32 [rows, ceil(V/32)], bit 1 = allowed, token t in bit t % 32 of word t // 32.

The noise depends only on (seed, position, token id), so a row's draw is the same in any batch, in any order
and after a restart. Kept sets are exact: order is by score, ties by the lower token id, and probability mass
is summed in integers, so no result depends on how a reduction was split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.torch.candidates import select_candidates

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)
# (shift, odd factor as a signed word) of the token hash. Two rounds are not enough: ids 32 apart correlate.
HASH_ROUNDS = ((17, 0xED5AD4BB - 2**32), (11, 0xAC4C1B51 - 2**32), (15, 0x31848BAB))
HASH_LAST_SHIFT = 14

# (h + 0.5) * UNIFORM_SCALE lies in (0, 1) for every 31-bit h, also after rounding to float32: the factor is
# the largest float32 below 2**-31.
UNIFORM_SCALE = (1 - 2**-24) * 2.0**-31
# Probability mass in fixed point, relative to the most likely token. 2**22 tokens still sum below 2**63.
MASS_ONE = 2.0**40
# 2**f = 1 + f (c4 + f (c3 + ...)) for f in [0, 1], within 3e-7. The native ops compute the same products and sums in
# the same order, so both have the same masses; a library's exp may differ in the last bit.
POWER_FACTORS = tuple(
    map(float.fromhex, ("0x1.d52664p-10", "0x1.2d5c5ep-7", "0x1.c7f4aep-5", "0x1.ebf194p-3", "0x1.62e43ep-1"))
)
LOG2_E = float.fromhex("0x1.715476p+0")
LEAST_POWER = -63.0  # the mass of 2**-63 is 0
# Beside the number of a token in the output: this bit if it is in the prompt.
IN_PROMPT = 1 << 30
# A top-k up to this many works on that many candidates instead of a sort.
NARROW_WIDTH = 1024
# On CPU, top-p tries these many candidates before it sorts the vocabulary.
NUCLEUS_WIDTHS = (256, 8192)
# Elements of a chunk of rows: on CPU its temporaries stay in a thread's cache, elsewhere they fit in memory.
THREAD_CHUNK_ELEMENTS = 1 << 16
DEVICE_CHUNK_ELEMENTS = 1 << 26
# Masking this many elements takes as long as waking another torch thread.
FEW_ELEMENTS = 2**18


def make_row_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Mix seed and position into the two words that key a row's noise; on the host, which knows both.

    Args:
        seeds, positions: [R] int64.

    Returns [R, 2] int32.
    Source: Steele, Lea and Flood, 2014 (SplitMix64), applied twice.
    """
    state = _mix64(seeds.astype(np.int64).view(np.uint64) + GOLDEN)
    state = _mix64(state + positions.astype(np.int64).view(np.uint64) * GOLDEN)
    return state.view(np.int32).reshape(-1, 2)


def make_gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise for rows of token ids.

    Args:
        keys: [R, 2] int32 from `make_row_keys`.
        token_ids: [R, K] or [1, K] int32.

    Returns [R, K] float32 between -2.9 and 22.3. Bit-identical for a (key, id) at any place of any tensor of
    one device; across devices the hash is identical and the value within the rounding of two logarithms.
    Source: integer hash after Wellons, 2018 (triple32), the second key added after its first round.
    """
    hashed = token_ids ^ keys[:, :1]
    shifted = torch.empty_like(hashed)
    for step, (shift, factor) in enumerate(HASH_ROUNDS):
        _xor_shifted(hashed, shift, shifted)
        hashed.mul_(factor)
        if step == 0:
            hashed.add_(keys[:, 1:])
    _xor_shifted(hashed, HASH_LAST_SHIFT, shifted)
    hashed.bitwise_and_(0x7FFFFFFF)
    # The winner of a draw has a small exponential -log(1 - u), so u is made where floats are dense: near 0.
    noise = hashed.to(torch.float32).add_(0.5).mul_(-UNIFORM_SCALE)
    return noise.log1p_().neg_().log_().neg_()


def split_rows(num_rows: int, row_size: int, device: torch.device) -> Iterator[slice]:
    """Slices over the rows of [num_rows, row_size] tensors, so small that temporaries are cheap."""
    on_cpu = device.type == "cpu"
    elements = THREAD_CHUNK_ELEMENTS * torch.get_num_threads() if on_cpu else DEVICE_CHUNK_ELEMENTS
    chunk = max(1, elements // row_size)
    for start in range(0, num_rows, chunk):
        yield slice(start, min(start + chunk, num_rows))


def draw_greedy(logits: Tensor) -> Tensor:
    """The most likely token per row, ties to the lowest id; -1 where the maximum is not finite.

    Args:
        logits: [R, V] float32.

    Returns [R] int64.
    """
    if logits.device.type == "cpu":
        # NumPy looks for the largest with vector instructions, torch does not: 4 ms against 0.4 for 16 rows of 152,064.
        values = logits.numpy()
        ids = values.argmax(axis=1)
        largest = values[np.arange(len(ids)), ids]
        return torch.from_numpy(np.where(np.isfinite(largest), ids, -1))
    best, token_ids = logits.max(dim=-1)
    return token_ids.where(best.isfinite(), -1)


def find_sound_rows(logits: Tensor) -> Tensor:
    """Rows [R] bool of logits [R, V] without NaN and +inf, and with a number."""
    if logits.device.type == "cpu":
        return torch.from_numpy(np.isfinite(logits.numpy().max(axis=1)))
    return logits.amax(dim=-1).isfinite()


def unpack_bitmask(bitmask: Tensor, vocab_size: int) -> Tensor:
    """Turn packed token masks into booleans.

    Args:
        bitmask: [M, W] int32, bit 1 = allowed. Tokens beyond the last
            word are forbidden: a grammar's vocabulary may be smaller than the padded one of the model.

    Returns [M, vocab_size] bool, True = allowed.
    """
    num_words = -(-vocab_size // 32)
    words = bitmask[:, :num_words]
    if words.shape[1] < num_words:
        words = torch.nn.functional.pad(words, (0, num_words - words.shape[1]))
    if words.device.type == "cpu":
        octets = words.contiguous().numpy().view(np.uint8)
        bits = np.unpackbits(octets, axis=1, count=vocab_size, bitorder="little")
        return torch.from_numpy(bits).view(torch.bool)
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, :vocab_size].bool()


def apply_bitmask(logits: Tensor, bitmask: Tensor) -> None:
    """Set the logits of forbidden tokens to -inf, in place.

    Args:
        logits: [R, V], contiguous.
        bitmask: [R, W] int32 as for `unpack_bitmask`.
    """
    allowed = unpack_bitmask(bitmask, logits.shape[1])
    if logits.device.type == "cpu" and allowed.numel() <= FEW_ELEMENTS:
        np.copyto(logits.numpy(), -np.inf, where=~allowed.numpy())
    else:
        logits.masked_fill_(~allowed, -torch.inf)


def penalise(
    logits: Tensor, places: Tensor, counts: Tensor, slots: Tensor, penalties: Tensor, used: Sequence[bool]
) -> None:
    """Apply penalties in place.

    The repetition penalty divides positive and multiplies negative logits of tokens in prompt or output. The frequency
    penalty is subtracted per occurrence in the output, the presence penalty once.

    Args:
        logits: [R, V] float32.
        places: [P] int64, rows of the logits, distinct.
        counts: [S, V] int32, how often a token is in the output, and IN_PROMPT if it is in the prompt.
        slots: [P] int64, rows of the counts.
        penalties: [P, 3] float32: repetition, frequency, presence.
        used: whether any row has this penalty, for each of the three.
    Source: Keskar et al., 2019 (CTRL) for the first; the OpenAI API for the others.
    """
    for chunk in split_rows(len(places), logits.shape[1], logits.device):
        part, seen = logits.index_select(0, places[chunk]), counts.index_select(0, slots[chunk])
        repetition, frequency, presence = penalties[chunk].unsqueeze(-1).unbind(1)
        if used[0]:
            penalised = torch.where(part > 0, part / repetition, part * repetition)
            part = torch.where(seen > 0, penalised, part)
        if used[1] or used[2]:
            num_seen = seen.bitwise_and_(IN_PROMPT - 1).to(torch.float32)
            part.sub_(num_seen * frequency)
            part.sub_(num_seen.clamp_(max=1.0).mul_(presence))
        logits.index_copy_(0, places[chunk], part)


def draw_full(logits: Tensor, keys: Tensor, temperature: Tensor, log_min_p: Tensor | None) -> Tensor:
    """Draw from softmax(logits / temperature) over the whole vocabulary, without a sort.

    Args:
        logits: [R, V] float32; -inf forbids a token.
        keys: [R, 2] int32 from `make_row_keys`.
        temperature: [R] float32, above 0.
        log_min_p: [R] float32, log of min_p (-inf: off); None when no row uses it.

    Returns [R] int64; -1 where no token is allowed or the logits hold NaN or +inf.
    """
    num_rows, vocab_size = logits.shape
    ids = torch.arange(vocab_size, dtype=torch.int32, device=logits.device).unsqueeze(0)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    for rows in split_rows(num_rows, vocab_size, logits.device):
        scores = scale_scores(logits[rows], temperature[rows])
        if log_min_p is not None:
            scores.masked_fill_(scores < log_min_p[rows, None], -torch.inf)
        token_ids[rows] = draw_greedy(scores.add_(make_gumbel_noise(keys[rows], ids)))
    return token_ids


def draw_filtered(
    logits: Tensor,
    keys: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    log_min_p: Tensor,
    width: int,
) -> Tensor:
    """Draw after top-k, then top-p of what top-k left, then min-p. Exact.

    Args:
        logits, keys, temperature, log_min_p: as in `draw_full`.
        top_k: [R] int64; at least V: off.
        top_p: [R] float32; above 1: off.
        width: candidates per row that are enough when every top_k is at most `width`; V when some rows have
            no top-k.

    Returns [R] int64; -1 as in `draw_full`.
    """
    num_rows, vocab_size = logits.shape
    vocab = torch.arange(vocab_size, device=logits.device)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    for rows in split_rows(num_rows, vocab_size, logits.device):
        scores = scale_scores(logits[rows], temperature[rows])
        values, ids, num_kept = select_kept(scores, vocab, top_k[rows], top_p[rows], log_min_p[rows], width)
        token_ids[rows] = _draw_prefix(values, ids, num_kept, keys[rows])
    return token_ids


def scale_scores(logits: Tensor, temperature: Tensor) -> Tensor:
    """(logits - row maximum) / temperature: 0 for the best token, so that a tiny temperature stays finite.

    Args:
        logits: [R, V] float32.
        temperature: [R] float32.

    Returns [R, V] float32; a row is all NaN when its maximum is not finite.
    """
    return (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature.unsqueeze(-1))


def select_kept(
    scores: Tensor, vocab: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens that survive the filters: a prefix of the candidates, best first.

    Args:
        scores: [R, V] float32 from `scale_scores`.
        vocab: [V] int64, 0..V-1.
        top_k, top_p, log_min_p, width: as in `draw_filtered`.

    Returns scores [R, W] float32, token ids [R, W] int64 and how many are kept, [R] int64 (at least 1).
    """
    vocab_size = scores.shape[-1]
    # Reading device values is free on CPU and forbidden elsewhere, where the sort is the only exact way.
    if width == vocab_size and scores.device.type == "cpu" and bool((top_k >= vocab_size).all()):
        total = _compute_mass(scores).sum(dim=-1)
        for try_width in NUCLEUS_WIDTHS:
            if try_width > vocab_size // 4:
                break
            values, ids = select_candidates(scores, vocab, try_width)
            num_kept = _count_kept(values, total, top_p, log_min_p)
            if bool((num_kept < try_width).all()):
                return values, ids, num_kept
    values, ids = select_candidates(scores, vocab, min(width, vocab_size))
    beyond_k = vocab[: values.shape[-1]] >= top_k.unsqueeze(-1)
    values.masked_fill_(beyond_k, -torch.inf)
    total = _compute_mass(values).sum(dim=-1)
    return values, ids, torch.minimum(_count_kept(values, total, top_p, log_min_p), top_k)


def _draw_prefix(values: Tensor, ids: Tensor, num_kept: Tensor, keys: Tensor) -> Tensor:
    """Gumbel-max over the first `num_kept` candidates; [R] int64, -1 for a row without a finite score."""
    if values.device.type == "cpu":
        width = int(num_kept.max())
        values, ids = values[:, :width], ids[:, :width]
    places = torch.arange(values.shape[-1], device=values.device)
    noisy = values + make_gumbel_noise(keys, ids.to(torch.int32))
    noisy.masked_fill_(places >= num_kept.unsqueeze(-1), -torch.inf)
    best = noisy.amax(dim=-1, keepdim=True)
    # Equal scores go to the lowest id, as in the full-vocabulary draw; NaN equals nothing.
    token_ids = ids.masked_fill(noisy != best, torch.iinfo(torch.int64).max).amin(dim=-1)
    return token_ids.where(best.squeeze(-1).isfinite(), -1)


def _count_kept(values: Tensor, total: Tensor, top_p: Tensor, log_min_p: Tensor) -> Tensor:
    """How many of the sorted candidates top-p and min-p keep; [R] int64, at least 1."""
    mass = _compute_mass(values)
    mass_before = mass.cumsum(dim=-1) - mass
    in_nucleus = mass_before.double() < top_p.double().mul(total.double()).unsqueeze(-1)
    kept = in_nucleus & (values >= log_min_p.unsqueeze(-1))
    return kept.sum(dim=-1).clamp_(min=1)


def _compute_mass(scores: Tensor) -> Tensor:
    """exp(scores) in fixed point, int64: sums are exact, whatever their order."""
    rest = scores.mul(LOG2_E).clamp_(min=LEAST_POWER)
    whole = rest.floor()
    rest.sub_(whole)
    value = torch.zeros_like(rest)
    for factor in POWER_FACTORS:
        value.add_(factor).mul_(rest)
    return value.add_(1.0).mul_(MASS_ONE).to(torch.int64).bitwise_right_shift_(whole.neg_().to(torch.int64))


def _mix64(state: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser on uint64 words; products wrap."""
    state = (state ^ (state >> np.uint64(30))) * MIX_1
    state = (state ^ (state >> np.uint64(27))) * MIX_2
    return state ^ (state >> np.uint64(31))


def _xor_shifted(words: Tensor, count: int, scratch: Tensor) -> None:
    """words ^= words >> count (logical), in place on int32."""
    torch.bitwise_right_shift(words, count, out=scratch)
    words.bitwise_xor_(scratch.bitwise_and_((1 << (32 - count)) - 1))
