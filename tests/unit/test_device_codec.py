"""Buckets coded on a device against the compiled passes of the host, bit by bit.

A form in numpy shows what surrounds the kernels, with shapes of every kind. Triton's kernels run in its interpreter on
the CPU (tests/conftest.py), and on a device where there is one. What the compiler makes of them for an NVIDIA device
is looked at, too. Rules: codec-3, codec-4, codec-7, codec-11, codec-12.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_cases import (
    DTYPES,
    SCRATCH,
    SEED,
    Results,
    check,
    coder,
    encoded,
    finite_need,
    gaussian,
    measured,
    own_rows,
)
from tailbound.codec import encode as host
from tailbound.codec.decode import MISSING, own_source
from tailbound.codec.feedback import write_residual
from tailbound.codec.records import Coding
from tailbound.codec.scale import agreed
from tailbound.codec.shape import shape_for
from tailbound.errors import CapabilityError
from tailbound.wire.bits import Bits
from tailbound.wire.schema import key_bytes
from tailbound.wire.tag import key_of

pytest.importorskip("torch", reason="missing capability 'torch': pip install 'tailbound[torch]'")
pytest.importorskip("triton", reason="missing capability 'triton': pip install 'tailbound[test]'")
import torch

from plain_form import PLAIN
from tailbound.torch import paths
from tailbound.torch.device_codec import fused, triton_kernels
from tailbound.torch.device_codec.fused import TRITON
from tailbound.torch.device_coder import By, Rows

BITS = st.sampled_from([16, 8, (4, 8)])
KEY = key_of(np.random.default_rng(5).bytes(key_bytes(1408) - 8), 0)
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda:0"
#: Entries, width, bits and tensors: groups of 16, 32 and 64 rows, one block of columns and a begun second one, several
#: groups; tensors have groups of every size.
SHAPES: dict[str, tuple[Any, ...]] = {
    "16 rows": (1000, 64), "32 rows": (30 * 64, 64), "64 rows": (64 * 144 - 5, 192), "3 groups": (9000, 64),
    "tensors": (64 * 200, 64, 8, (127 * 64 - 9, 64 * 72 + 9, 50, 14)),
}  # fmt: skip


# -- what surrounds the kernels, by the form in numpy -----------------------------------------------------------------


@given(
    st.integers(1, 200_000), st.integers(1, 22), st.integers(-30, 20), st.sampled_from(DTYPES), st.booleans(),
    st.integers(0, 100), BITS,
)  # fmt: skip
@settings(max_examples=40)
def test_packets_are_those_of_the_compiled_pass(
    numel: int, width: int, power: int, kind: str, rotate: bool, off: int, bits: Bits
) -> None:
    """Own scales, and for a switch such that are too small or too large; types are read as they are; a job with a key.

    Rules: codec-12, auth-1.
    """
    shape = shape_for(numel, 64 * width, bits)
    tensor = torch.from_numpy(gaussian(numel, off, 10.0 ** min(power, 3 if kind == "float16" else 20)))
    tensor = tensor.to(getattr(torch, kind))
    x = tensor.float().numpy()
    switched = agreed(measured(host, x, shape, rotate)[None])
    switched[::2] -= np.int16(off % 37)
    for exponents in (None, switched):
        plain = check(tensor, shape, exponents, rotate)
    keyed = check(tensor, shape, exponents, rotate, key=KEY)
    np.testing.assert_array_equal(keyed.packets[:, 64:], plain.packets[:, 64:])
    assert (keyed.partials != plain.partials).any()


@given(
    st.integers(1, 200_000), st.integers(1, 22), st.sampled_from([0.0, 0.02, 0.5, 0.97, 1.0]), st.booleans(),
    st.integers(0, 100), BITS, st.booleans(),
)  # fmt: skip
@settings(max_examples=40)
def test_averages_are_those_of_the_compiled_pass(
    numel: int, width: int, missing: float, rotate: bool, seed: int, bits: Bits, summed: bool
) -> None:
    """Ranks on a GPU and on a host stay equal. Rules: codec-11, codec-12."""
    Results(shape_for(numel, 64 * width, bits), seed, missing, summed=summed and bits == 8).check(rotate)


@pytest.mark.parametrize("bits", [16, 8, (4, 8)])
def test_what_codes_leave_unsaid_is_that_of_the_host(bits: Bits) -> None:
    """Error feedback. Rule: codec-12."""
    shape, x = shape_for(40_000 * 5, 704, bits), gaussian(200_000, 3)
    tensor, coding, told = torch.from_numpy(x), Coding(SEED), []
    for by, data in (host, x), (coder(), tensor):
        out = encoded(by, data, shape)
        residual = np.full(shape.numel, np.nan, np.float32)
        write, into = (write_residual, residual) if by is host else (by.write_residual, torch.from_numpy(residual))
        write(data, own_rows(out), out.scales, shape, coding, into, SCRATCH)
        told.append(residual)
    assert np.array_equal(*(residual.view(np.uint32) for residual in told))
    assert 0 < np.abs(told[0]).mean() < np.abs(x).mean()


def test_sources_outside_the_ring_are_refused() -> None:
    results = Results(shape_for(1000, 1408), 5, 0.0)
    ours, out = coder(), torch.zeros(1000)
    for bad in (len(results.ring), own_source(len(results.own))):
        results.source[3] = bad
        with pytest.raises(ValueError, match="outside the ring"):
            results.decoded(ours, out, True)


# -- Triton's kernels -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", SHAPES)
def test_packets_are_those_of_the_host(name: str, kind: str) -> None:
    """Codes, scales, clipped entries and checks; scales for a switch fit in one group, and clip in the others.

    One of several groups has zeros only.
    """
    shape = shape_for(*SHAPES[name])
    tensor = torch.from_numpy(gaussian(shape.numel, 7, 1e-2)).to(getattr(torch, kind))
    tensor[: shape.layout.entries[1] if shape.groups > 1 else 0] = 0
    check(tensor.to(DEVICE), shape, form=TRITON)
    exponents = agreed(measured(host, tensor.float().numpy(), shape)[None])
    exponents[1:] -= np.int16(31)
    out = check(tensor.to(DEVICE), shape, exponents, form=TRITON)
    assert (out.done.clipped > 0) == (shape.groups > 1)


@pytest.mark.parametrize("summed", [False, True], ids=["codes", "sums"])
@pytest.mark.parametrize("name", SHAPES)
def test_averages_are_those_of_the_host(name: str, summed: bool) -> None:
    """Rows in the ring, own ones and missing ones, scales with offsets and without, a group of which nothing came."""
    results = Results(shape_for(*SHAPES[name]), 3, 0.1, summed=summed)
    if results.shape.groups > 1:
        results.source[64:128] = MISSING
    assert results.check(device=DEVICE, form=TRITON).any()


@pytest.mark.parametrize("bits", [16, (4, 8)])
@pytest.mark.parametrize("name", SHAPES)
def test_codes_of_other_bits_are_those_of_the_host(name: str, bits: Bits) -> None:
    """Packets and averages; a begun second block of columns. Rule: codec-12."""
    numel, width, *rest = SHAPES[name]
    tensors = rest[1] if rest else ()
    shape = shape_for(numel if tensors else numel // 2 if bits == 16 else numel * 2, width, bits, tensors)
    out = check(torch.from_numpy(gaussian(shape.numel, 7, 1e-2)).to(DEVICE), shape, form=TRITON)
    assert (out.done.clipped > 0) == (bits != 16)
    assert Results(shape, 3, 0.1).check(device=DEVICE, form=TRITON).any()


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float64"])
def test_averages_of_other_types_are_rounded_once_at_the_end(kind: str) -> None:
    """Rule: codec-12."""
    results = Results(shape_for(*SHAPES["64 rows"]), 3, 0.1)
    out = torch.full((results.shape.numel,), torch.nan, dtype=getattr(torch, kind), device=DEVICE)
    by, plain = coder(DEVICE, TRITON), out.clone()
    results.decoded(by, out, True)
    results.decoded(coder(DEVICE), plain, True)
    by._path.stream.join()
    bits = torch.int64 if kind == "float64" else torch.int16
    assert torch.equal(out.view(bits), plain.view(bits))


def test_half_way_between_two_values_of_bfloat16_the_even_one_is_taken() -> None:
    """The one place where the kernels round by themselves; the interpreter, left to itself, would cut off."""
    shape, coding = shape_for(1024, 64), Coding(5, rotate=False)
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(4).view(16, 64)
    ones, zeros = torch.ones(16, device=DEVICE), torch.full((16,), -1, dtype=torch.int32, device=DEVICE)
    factors = ones * (1 + 2.0**-7 + 2.0**-8)
    given = []
    for form in (TRITON, PLAIN):
        out = torch.empty(1024, dtype=torch.bfloat16, device=DEVICE)
        form.decode(Rows(codes, factors, zeros, ones[:1], False, False), shape, coding, out)
        given.append(out.view(torch.int16))
    assert torch.equal(*given)


@pytest.mark.parametrize("form", [PLAIN, TRITON], ids=["plain", "triton"])
def test_no_packet_is_touched_where_a_value_is_not_finite(form: Any) -> None:
    """Rule: codec-4."""
    shape = shape_for(*SHAPES["3 groups"])
    whole = gaussian(shape.numel)
    for value, at in zip([np.nan, -np.inf, 3e38, 1e300], [0, 4500, 8999, 3], strict=True):
        x = whole.astype(np.float64 if value == 1e300 else np.float32)  # no float holds it
        x[at] = value
        tensor = torch.from_numpy(x).to(DEVICE)
        with np.errstate(over="ignore", invalid="ignore"):  # the interpreter's own arithmetic
            out = encoded(coder(DEVICE, form), tensor, shape)
            assert finite_need(coder(DEVICE, form), tensor, shape, Coding(1)) is None, (value, at)
        assert not out.done.finite, (value, at)
        assert (out.packets == 7).all(), (value, at)


def compiled(tmp_path: Path, *asked: tuple[str, int, bool]) -> list[dict[str, int]]:
    """Instructions of kernels, by name, rows and whether the compiler may fuse."""
    jobs = [(name, rows, fused.BLOCK, fused.OPTIONS | ({"enable_fp_fusion": True} if fuse else {}))
            for name, rows, fuse in asked]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).parents[1] / "jobs/triton_compiled.py"
    done = subprocess.run(
        [sys.executable, script, triton_kernels.__file__, json.dumps(jobs)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: list[dict[str, int]] = json.loads(done.stdout)
    return found


#: Butterflies of 16 rows in four stages, of 64 in six, and so on; encoding adds an offset to each value.
KERNELS = [("largest", 16, 64), ("encode", 16, 80), ("decode", 16, 64),
           ("largest", 64, 384), ("encode", 64, 448), ("decode", 64, 384),
           ("encode4", 16, 80), ("decode4", 16, 64), ("encode4", 64, 448), ("decode4", 64, 384),
           ("encode16", 16, 80), ("decode16", 16, 64), ("encode16", 64, 448), ("decode16", 64, 384),
           ("encode", 4, 12), ("decode", 4, 8), ("encode4", 2, 4), ("decode16", 8, 24)]  # fmt: skip


@pytest.mark.parametrize("kernels", [KERNELS[1:3], pytest.param(KERNELS, marks=pytest.mark.thorough)], ids=len)
def test_compiled_for_a_device_nothing_is_fused_left_out_or_flushed(
    kernels: list[tuple[str, int, int]], tmp_path: Path
) -> None:
    """In PTX and in machine code: as many additions as butterflies have, each rounded, and none by way of memory.

    The compiler would fuse if it were let, and it would be seen here: the last one is compiled so.
    """
    asked = [(name, rows, False) for name, rows, _ in kernels]
    *found, free = compiled(tmp_path, *asked, ("encode", 16, True))
    for (name, rows, sums), one in zip(kernels, found, strict=True):
        assert one["sums"] == one["FADD"] == sums, (name, rows, one)
        assert one["products"] >= rows
        assert one["fused"] == one["FFMA"] == one["loose"] == one["flushed"] == 0, (name, rows, one)
        assert one["shared"] <= 16 or name == "encode4", (name, rows, one)  # two codes of a byte are two threads'
    assert free["fused"] == free["FFMA"] == 16


def test_every_launch_forbids_fusing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *_, **how: seen.append(how)

    for name in ("largest", "encode", "decode"):
        monkeypatch.setattr(triton_kernels, name, Kernel())
    x, form, shape = torch.zeros(1000), TRITON, shape_for(1000, 64)
    form.largest(x, shape, Coding(1))
    form.encode(x, shape, Coding(1), By(x, x, x))
    form.decode(Rows(x, x, x, x, False, False), shape, Coding(1), x)
    assert [how["enable_fp_fusion"] for how in seen] == [False] * 3


def test_without_triton_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert paths.triton_form() is TRITON
    monkeypatch.setitem(sys.modules, "tailbound.torch.device_codec.fused", None)
    with pytest.raises(CapabilityError, match="coded by kernels of Triton, which cannot be imported"):
        paths.triton_form()
