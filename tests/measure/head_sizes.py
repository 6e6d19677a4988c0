"""Compiles attention for every head size and GPU: what it takes of shared memory and registers, and what spills.

`python -m tests.measure.head_sizes [--arch 80 89 90 100] [--dtype bf16] [--kinds short long]`: one line a kernel; the
exit status is 1 if one does not fit. Nothing runs, so no GPU is needed; a kernel takes some seconds.
"""

import argparse
import sys
from itertools import product
from typing import get_args

from kernels.triton.tiles import Kind
from tests.kernels.triton.test_ahead import SHARED_BYTES, compile_attention

HEAD_DIMS = range(32, 513, 32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=sorted(SHARED_BYTES), choices=sorted(SHARED_BYTES))
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--kinds", nargs="+", choices=get_args(Kind), default=get_args(Kind))
    parser.add_argument("--head-dims", type=int, nargs="+", default=list(HEAD_DIMS))
    args = parser.parse_args()
    num_failed = 0
    print("arch  kind   drafts  head  shared KiB (of)  registers  spilled bytes")
    drafts = [(kind, False) for kind in args.kinds] + [("short", True)] * ("short" in args.kinds)
    for arch, (kind, is_draft), head_dim in product(args.arch, drafts, args.head_dims):
        compiled, _ = compile_attention(arch, kind, args.dtype, head_dim=head_dim, is_draft=is_draft)
        fits = compiled.shared_bytes <= SHARED_BYTES[arch]
        num_failed += not fits
        memory = f"{compiled.shared_bytes // 1024:>6} ({SHARED_BYTES[arch] // 1024})"
        found = f"{memory}  {compiled.num_registers:>9}  {compiled.stack_bytes:>13}{'' if fits else '  does not fit'}"
        print(f"{arch:>4}  {kind:5}  {is_draft!s:6}  {head_dim:>4}  {found}", flush=True)
    print(f"{num_failed} do not fit")
    return num_failed > 0


if __name__ == "__main__":
    sys.exit(main())
