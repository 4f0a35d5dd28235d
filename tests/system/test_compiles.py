"""Triton's compiler accepts every kernel.

Compiling needs no GPU, and the interpreter accepts more.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dpfed.accel import dropout, lora, norm, patches, windows

def made(kernel, pointer, floats=(), mask=None, **constants):
    others = dict.fromkeys(("mean", "rstd"), "*fp32") | dict.fromkeys(floats, "fp32")
    others |= dict.fromkeys(constants, "constexpr")
    pointers = ("x", "w1", "w2", "y", "low", "out", "grad", "weight", "bias", "q", "k", "v", "mask")
    pointers += ("grad_q", "grad_k", "grad_v")
    whole = dict.fromkeys(("index", "key", "rule"), "*i64")
    types = dict.fromkeys(pointers, pointer) | whole | {"mask": mask or pointer} | others
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    given = {(i,): constants[name] for i, name in enumerate(signature) if name in constants}
    source = ASTSource(fn=kernel, signature=signature, constexprs=given, attrs={})
    target = GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options={"num_warps": 4}).asm["ptx"]

for pointer in sys.argv[1:]:
    for rows in (16, 64):
        found = [made(lora._two_products, pointer, ("s1", "s2"), N=rows, R=16, D1=64, D2=64)]
        sizes = {"N": rows, "R": 16, "D": 64}
        found += [made(lora._outer, pointer, ("s",), WIDE=w, **sizes) for w in (False, True)]
        if pointer == "*bf16":
            # By the matrix unit.
            assert all("mma" in text for text in found)
        else:
            # Without rounding to tf32.
            assert not any("tf32" in text for text in found)
    swin, bert, bert_unmasked = (True, 49, pointer), (False, 1, "*fp32"), (False, 0, pointer)
    for biased, rows, mask in (swin, bert, bert_unmasked):
        window = {"N": 49, "D": 32, "SIDE": 64, "DEPTH": 32, "BIASED": biased, "MASK_ROWS": rows}
        made(windows.attend, pointer, ("scale",), mask, **window)
        made(windows.attend_backward, pointer, ("scale",), mask, **window)
    made(windows.reorder, pointer, N=64, WIDTH=96, ROWS=16, COLUMNS=128)
    made(norm._forward, pointer, ("eps",), R=32, C=128)
    made(norm._backward, pointer, R=32, C=128)
    assert "div.rn.f32" in made(dropout._drop, pointer, B=1024)
    for side, kernel, stride in ((32, 3, 1), (4, 3, 2), (32, 1, 2)):
        places = (side - 1) // stride + 1
        sizes = dict.fromkeys(("H", "W"), side) | dict.fromkeys(("DOWN", "ACROSS"), places)
        sizes |= dict.fromkeys(("KH", "KW"), kernel) | dict.fromkeys(("SH", "SW"), stride)
        sizes |= dict.fromkeys(("PH", "PW"), kernel // 2) | {"B": patches.BLOCK}
        for function in (patches._columns, patches._images):
            text = made(function, pointer, **sizes)
            # Divisions by constants are products and shifts.
            assert "div." not in text and "rem." not in text
print("all")
"""


@pytest.mark.parametrize("pointer", ["*bf16", "*fp32"])
def test_a_gpu_compiles_what_the_interpreter_runs(pointer: str, tmp_path: Path) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, pointer], env=env, capture_output=True, text=True
    )
    assert done.stdout.strip() == "all", done.stderr
