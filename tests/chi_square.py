"""Chi-square test of counts against probabilities, without a statistics package."""

import numpy as np
import torch

MIN_EXPECTED = 5.0


def compute_p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Probability of a fit at least as bad, were the probabilities true; 0 for a count where none may be.

    Args:
        counts, probabilities: [N]. Cells expected fewer than 5 times are pooled.
    """
    if counts[probabilities == 0].any():
        return 0.0
    expected = probabilities * counts.sum()
    is_rare = expected < MIN_EXPECTED
    observed = np.append(counts[~is_rare], counts[is_rare].sum()).astype(np.float64)
    expected = np.append(expected[~is_rare], expected[is_rare].sum())
    if expected[-1] < MIN_EXPECTED:
        observed, expected = observed[:-1], expected[:-1]
    if len(observed) < 2:
        return 1.0
    statistic = float(((observed - expected) ** 2 / expected).sum())
    half_freedom = torch.tensor((len(observed) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, torch.tensor(statistic / 2, dtype=torch.float64)))
