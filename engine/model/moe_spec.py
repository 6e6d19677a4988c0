"""MoESpec: the shape, arithmetic and tensor names of one mixture-of-experts block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kernels.ops import GatedActivation, Routing

SWIGLU = GatedActivation()

# How a checkpoint stores the experts:
#   "separate"     three matrices per expert
#   "stacked"      [E, 2 I, M] and [E, M, I], gate first
#   "interleaved"  [E, M, 2 I] and [E, I, M], gate and up alternating (gpt-oss)
#   "mxfp4"        as "interleaved", in 4-bit blocks of [E, out, in]
ExpertLayout = Literal["separate", "stacked", "interleaved", "mxfp4"]


@dataclass(frozen=True, slots=True)
class MoENames:
    """Names of a block's tensors in a checkpoint."""

    block: str = "mlp"  # in the layer
    router: str = "gate"
    correction_bias: str = "gate.e_score_correction_bias"
    layout: ExpertLayout = "separate"
    # Names of one expert's matrices, or of the stacked gate and up, and down.
    experts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "shared_experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec(Routing):
    """How a block chooses experts for each token, and what they compute."""

    num_experts: int
    inner_size: int  # of an expert
    has_correction_bias: bool = False  # added to the scores for the choice, not for the weights
    has_bias: bool = False  # of router and experts
    activation: GatedActivation = SWIGLU
    shared_size: int = 0  # inner size of the expert that all tokens pass through; 0: none
    is_shared_gated: bool = False  # whether a sigmoid scales the shared expert's result
    names: MoENames = MoENames()
