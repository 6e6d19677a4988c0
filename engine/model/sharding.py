"""Sharding: which part of each matrix a rank holds, under tensor parallelism.

    queries, gate, up, output head    rows: each rank computes some heads, inner values or logits
    output projection, down           columns (inputs): each rank computes a part of every sum; `Comm.sum` adds them
    experts                           as the MLP, expert by expert; or each rank holds some of them whole
    all else                          each rank holds a copy

Under pipeline parallelism each stage holds some of the layers, divided among its ranks as above; the first stage also
holds the embedding and the output head.

Sums over ranks are computed as 8 slices of the inputs, folded in one tree. 1, 2, 4 and 8 ranks give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.comm import Comm
from engine.errors import ConfigError
from engine.model.config import ModelConfig
from engine.model.implementation import TransformersConfig
from engine.model.layer_spec import LayerSpec

NUM_SLICES = 8  # of the inputs of a product that ranks add up


@dataclass(frozen=True, slots=True)
class Sharding:
    """The place of one rank among the `size` ranks of its stage.

    Args:
        layers: [first, end) of the layers that the stage holds; None: all.
        is_sliced: compute row-parallel sums in slices also on one rank, for the bits of several.
        has_whole_experts: ranks hold whole experts instead of a part of each.
    """

    rank: int = 0
    size: int = 1
    comm: Comm | None = None  # None for one rank
    is_sliced: bool = False
    has_whole_experts: bool = False
    layers: tuple[int, int] | None = None

    def count(self, total: int) -> int:
        return total // self.size

    def part(self, total: int) -> tuple[int, int]:
        """Return (start, length) of the rank's part of a dimension that the ranks divide evenly."""
        return self.rank * self.count(total), self.count(total)

    def expert_ends(self, num_experts: int) -> list[int]:
        """Return the end of each rank's experts, where ranks hold whole ones; their numbers differ by at most one."""
        return [num_experts * rank // self.size for rank in range(1, self.size + 1)]

    def kv_part(self, num_kv_heads: int) -> tuple[int, int]:
        """Return (first, number) of the rank's KV heads. With more ranks than KV heads, several ranks hold the same."""
        return self.rank * num_kv_heads // self.size, max(1, self.count(num_kv_heads))

    def vocab_parts(self, vocab_size: int) -> list[tuple[int, int]]:
        """Return (start, length) of the rows of the output head on each rank; the last ones may be shorter."""
        step = -(-vocab_size // self.size)
        starts = [min(rank * step, vocab_size) for rank in range(self.size)]
        return [(start, min(step, vocab_size - start)) for start in starts]

    def shrink(self, spec: LayerSpec) -> LayerSpec:
        """Return the spec of the rank's part of a layer."""
        if self.size == 1:
            return spec
        return replace(
            spec, num_heads=self.count(spec.num_heads), num_kv_heads=self.kv_part(spec.num_kv_heads)[1],
            intermediate_size=self.count(spec.intermediate_size),
        )

    def count_slices(self, num_inputs: int, multiple: int) -> int:
        """Return the number of slices that this rank multiplies.

        Args:
            num_inputs: the rank's inputs of the product.
            multiple: required divisor of a slice's inputs. Without it the rank's part is one slice, and the bits
                depend on the number of ranks.
        """
        slices = NUM_SLICES // self.size
        return slices if num_inputs % (slices * multiple) == 0 else 1


ONE_RANK = Sharding()


def check_shardable(config: ModelConfig, size: int, has_whole_experts: bool = False) -> None:
    """Check that `size` ranks can divide the model."""
    name = f"tensor_parallel_size={size}"
    kv_heads = config.num_key_value_heads
    if isinstance(config, TransformersConfig):
        raise ConfigError(f"{name} needs our decoder; {config.architecture} runs on the code of transformers")
    if config.style.qk_norm == "full":
        raise ConfigError(f"{name} is not supported for {config.architecture}: its norms span all heads")
    numbers = {
        "attention heads": config.num_attention_heads,
        "inner values of the MLP": config.intermediate_size,
    }
    if has_whole_experts and not any(spec.moe for spec in config.layer_specs):
        raise ConfigError("enable_expert_parallel: the model has no experts")
    for spec in config.layer_specs:
        if (moe := spec.moe) is None:
            continue
        numbers["inner values of the shared expert"] = moe.shared_size
        if has_whole_experts and moe.num_experts < size:
            raise ConfigError(f"{name} is more than the model's {moe.num_experts} experts")
        if not has_whole_experts:
            numbers["inner values of an expert (enable_expert_parallel divides none)"] = moe.inner_size
    for what, number in numbers.items():
        if number % size:
            raise ConfigError(f"{name} does not divide the model's {number} {what}")
    if kv_heads % size and size % kv_heads:
        raise ConfigError(f"{name} neither divides the model's {kv_heads} KV heads nor is a multiple of them")
