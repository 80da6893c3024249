"""Compiles every Triton kernel for devices that need not be here. Run as a program by ``test_triton_compile``.

Prints one JSON object per kernel: its name, shared memory and multiplications that were fused with an addition.
"""

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from services.executor.kernels.triton import attention, draw, elementwise, product, tiles

_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def compile_kernel(
    kernel: Any, architecture: int, types: dict[str, str], constants: dict[str, Any], **how: Any
) -> None:
    """``types`` of the arguments that are not constants; pointers are aligned as torch's are."""
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name, type_ in types.items() if type_[0] == "*"},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=how)
    fused = compiled.asm["ptx"].count("fma.rn.f32")
    print(json.dumps([kernel.__name__, architecture, constants, compiled.metadata.shared, fused]))


def _types(dtype: torch.dtype, values: str, **others: str) -> dict[str, str]:
    pairs = [(name, f"*{_NAMES[dtype]}") for name in values.split()]
    return dict(pairs) | {name: type_ for type_, names in others.items() for name in names.split()}


def compile_all(architecture: int, dtype: torch.dtype) -> None:
    """Each kernel once, attention and product in several shapes."""
    floats, ints = "*fp32", "*i32"
    for heads, kv_heads, dim in ((9, 3, 64), (8, 4, 256)):
        shape = {"NUM_HEADS": heads, "HEAD_DIM": dim, "SEGMENT": tiles.SEGMENT, "PADDED_DIM": dim}
        types = _types(dtype, "queries keys values out") | {"scale": "fp32"}
        types |= dict.fromkeys(("peaks", "totals", "founds"), floats)
        types |= dict.fromkeys(("tiles", "tables", "query_starts", "context_lens"), ints)
        types |= dict.fromkeys(("table_width", "max_segments", "window"), "i32")
        pairs, tile = tiles.tile_pairs(heads // kv_heads), attention.tile_positions(dim, dtype)
        constants = shape | {"NUM_KV_HEADS": kv_heads, "BLOCK_SIZE": 16, "PAIRS": pairs, "TILE": tile}
        how = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}
        compile_kernel(attention.attend_kernel, architecture, types, constants, **how)
    types = _types(dtype, "out") | dict.fromkeys(("peaks", "totals", "founds"), floats)
    types |= {"split_tokens": ints, "split_ends": ints, "max_segments": "i32", "window": "i32"}
    compile_kernel(attention.fold_kernel, architecture, types, shape | {"HEADS": 4}, enable_fp_fusion=False)
    for columns in (32, 64, 128):
        types = _types(dtype, "x weight bias out") | dict.fromkeys(("num_rows", "num_columns", "depth"), "i32")
        constants = {"ROWS": 64, "COLUMNS": columns, "DEPTH": product.tile_depth(dtype), "EVEN": True, "BIAS": True}
        compile_kernel(product.product_kernel, architecture, types, constants, num_warps=4, num_stages=3)
    types = _types(dtype, "qkv query_norm key_norm queries keys values")
    types |= {"cos": floats, "sin": floats, "positions": ints, "slots": "*i64", "eps": "fp32"}
    constants = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_SIZE": 16}
    constants |= {"NORM": True, "TURN": True, "HEADS": 8, "PADDED_HALF": 64}
    compile_kernel(elementwise.rotary_write_kernel, architecture, types, constants, num_warps=2)
    constants = {"COLUMNS": 8192, "PADDED": 8192, "ADD": True}
    types = _types(dtype, "x residual weight out") | {"eps": "fp32"}
    compile_kernel(elementwise.add_rms_norm_kernel, architecture, types, constants, num_warps=16)
    types = dict.fromkeys(("logits", "bests", "temperatures", "min_ps"), floats) | {"vocab_size": "i32"}
    types |= {"rows": "*i64", "out": "*i64", "top_ks": ints, "top_ps": "*fp64", "numbers": "*fp64"}
    compile_kernel(draw.draw_kernel, architecture, types, {"TILE": 2048}, num_warps=8)
    types = _types(dtype, "gate_up out")
    compile_kernel(elementwise.silu_mul_kernel, architecture, types, {"COLUMNS": 1536, "WIDTH": 1024})


if __name__ == "__main__":
    for named in sys.argv[1:]:
        compile_all(*{"80": (80, torch.bfloat16), "90": (90, torch.bfloat16), "90f": (90, torch.float32)}[named])
