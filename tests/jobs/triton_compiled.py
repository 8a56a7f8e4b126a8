"""Compiles the kernels of ``triton_kernels`` for an NVIDIA device, which takes no device, and counts instructions.

A process of its own, without TRITON_INTERPRET. Arguments: the file of the kernels, and what to compile as JSON, a list
of [kernel, rows of a group, columns of a program, options]. Prints a list of counts.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tailbound.codec.format import FORMATS

FLOATS, INTEGERS = "*fp32", "*i32"
POINTERS = {
    "largest": {"x": FLOATS, "out": INTEGERS, "squares": "*fp64"},
    "encode": {
        "x": FLOATS, "factors": FLOATS, "limits": FLOATS, "keys": INTEGERS, "out": "*u8", "beyond": "*i64",
    },
    "decode": {
        "rows": "*u8", "factors": FLOATS, "keys": INTEGERS, "zeros": INTEGERS, "group_factors": FLOATS,
        "out": FLOATS,
    },
}  # fmt: skip
LAYOUT = {"groups": "*i32", "first_rows": "*i64", "first_entries": "*i64"}
HOPPER = GPUTarget("cuda", 90, 32)
NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"


def load(path: str) -> Any:
    """The kernels, without ``tailbound.torch`` and PyTorch, which takes seconds to import."""
    spec = importlib.util.spec_from_file_location("triton_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def counts(kernels: Any, name: str, rows: int, block: int, options: dict[str, Any]) -> dict[str, int]:
    """Instructions of a kernel: in PTX by their names, in machine code fused ones; shared memory in bytes.

    ``encode4`` is ``encode`` for codes of 4 bits, and so on; without a number they are of 8.
    """
    constants = {"ROWS": rows, "BLOCK": block, "ROTATE": True}
    name, code = (plain := name.rstrip("0123456789")), FORMATS[int(name.removeprefix(plain) or 8)]
    words = [word for word in ("codes", "seed", "first") if word != "first" or name != "largest"]
    signature = POINTERS[name] | LAYOUT | dict.fromkeys(words, "i32")
    constants |= {"SQUARES": code.clips} if name == "largest" else {"PACKING": code.packing, "ZERO": code.zero}
    if name == "decode":
        constants["SUMMED"] = False
    done = triton.compile(ASTSource(getattr(kernels, name), signature, constants), target=HOPPER, options=options)
    found = Counter(re.findall(r"^\s+(?:@\S+ )?([a-z0-9.:_]+)\s", done.asm["ptx"], re.MULTILINE))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        machine = subprocess.run([NVDISASM, "-c", file.name], capture_output=True, text=True, check=True).stdout
    return {
        "sums": found["add.rn.f32"] + found["sub.rn.f32"],
        "products": found["mul.rn.f32"],
        "fused": sum(count for word, count in found.items() if word.startswith(("fma", "mad.rn.f"))),
        "loose": sum(found[word] for word in ("add.f32", "sub.f32", "mul.f32")),
        "flushed": sum(count for word, count in found.items() if "ftz" in word),
        "FFMA": len(re.findall(r"\bFFMA", machine)),
        "FADD": len(re.findall(r"\bFADD", machine)),
        "shared": done.metadata.shared,
    }


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter compiles nothing"
    print(json.dumps([counts(load(sys.argv[1]), *each) for each in json.loads(sys.argv[2])]))
