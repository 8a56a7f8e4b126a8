"""The schema as data: no holes, no number used twice, generated files fresh, serial arithmetic."""

from __future__ import annotations

import dataclasses
import platform
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from generate.__main__ import generated, of_schema, stale
from reference_proof import check_reference
from tailbound.kernel.cache import assets
from tailbound.kernel.compile import clang_path
from tailbound.wire import schema
from tailbound.wire.packets import DTYPES, HEADER_DTYPE, dtype_of
from tailbound.wire.schema import Field, Struct, op_label, op_slot, serial_distance

U32 = st.integers(0, 0xFFFFFFFF)
STRUCTS = (schema.HEADER, *schema.STRUCTS, *schema.RECORDS)


def refused_by_c(claims: list[str]) -> str:
    """What the programs' compiler says against claims about the generated headers; empty if all of them hold."""
    source = [
        "#include <stddef.h>",
        "#include <linux/bpf.h>",
        *(f'#include "{name}.h"' for name in ("wire", "abi", "records")),
    ]
    source += [f'_Static_assert({claim}, "{claim}");' for claim in claims]
    include = [f"-I{assets('ebpf')}", f"-I{assets('core')}", f"-I/usr/include/{platform.machine()}-linux-gnu"]
    command = [str(clang_path()), "-target", "bpf", "-fsyntax-only", "-x", "c", *include, "-"]
    return subprocess.run(command, input="\n".join(source), capture_output=True, text=True, timeout=100).stderr


@pytest.mark.needs("clang", "libbpf")
def test_c_lays_structs_out_like_numpy() -> None:
    """Size, place, number and sign of every field, and that nothing lies between two: as the compiler has them."""
    claims = []
    for struct in STRUCTS:
        dtype = HEADER_DTYPE if struct is schema.HEADER else DTYPES[struct.name]
        end = 0
        for field in struct.fields:
            base, offset, *_ = dtype.fields[field.name]
            assert offset == end, f"hole before {struct.name}.{field.name}"
            end += base.itemsize
            here = f"((struct {struct.name} *)0)->{field.name}"
            claims.append(f"offsetof(struct {struct.name}, {field.name}) == {offset}")
            claims.append(f"sizeof({here}) == {base.itemsize}")
            if field.count > 1:
                here += "[0]"
                claims.append(f"sizeof({here}) == {base.base.itemsize}")
            if field.kind[0] in "us" and struct is not schema.HEADER:  # the header's are __be16 and the like
                claims.append(f"((__typeof__({here}))-1 < 0) == {int(base.base.kind == 'i')}")
        claims.append(f"sizeof(struct {struct.name}) == {end}")
    assert len(claims) > 2 * sum(len(struct.fields) for struct in STRUCTS)
    assert refused_by_c(claims) == ""
    for wrong in ("offsetof(struct tb_slot, op) == 0", "sizeof(struct tb_header) == 63"):
        assert "static" in refused_by_c([wrong])


@pytest.mark.parametrize(("first", "second", "why"), [("u8", "u32", "aligned"), ("u32", "u16", "pad")])
def test_a_hole_is_refused(first: str, second: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        dtype_of(Struct("tb_bad", "", (Field("a", first, ""), Field("b", second, ""))))


def test_every_verdict_has_a_meaning_and_an_advice() -> None:
    """A generated page shows them."""
    assert [verdict for verdict in schema.Verdict if not (verdict.meaning and verdict.advice)] == []


def test_what_holds_a_lock_is_not_mmapped() -> None:
    locked = {s.name for s in schema.STRUCTS if any(f.kind == "lock" for f in s.fields)}
    assert locked
    for map_ in schema.WORKER_MAPS:
        assert map_.mmap == (map_.value not in locked and not map_.secret), map_.name


def test_generated_files_are_fresh_and_a_stale_one_is_named(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stale(generated(repository)) == []
    for path, text in of_schema(tmp_path).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(schema, "HEADER", dataclasses.replace(schema.HEADER, doc="Something else."))
    assert [p.name for p in stale(of_schema(tmp_path))] == ["wire.h", "wire.p4"]


def test_a_reader_of_the_page_can_make_a_packet(repository: Path) -> None:
    """The page's formula with the page's constants gives the check."""
    page = (repository / "docs/wire.md").read_text()
    k1, k2, k3, k4 = (int(re.search(rf"K{n} = (0x[0-9A-F]{{16}})", page)[1], 16) for n in (1, 2, 3, 4))  # type: ignore[index]
    rng = np.random.default_rng(1)
    header, payload = rng.bytes(64), rng.bytes(1408)
    words = np.frombuffer(payload + header[:56] + bytes(8), "<u8").tolist()
    a, b = [0, 0], [0, 0]
    for i, word in enumerate(words):
        a[i % 2] = (a[i % 2] + word) % 2**64
        b[i % 2] = (b[i % 2] + a[i % 2]) % 2**64
    c = (a[0] * k1 + a[1] * k2 + b[0] * k3 + b[1] * k4) % 2**64
    assert c ^ (c >> 32) == check_reference(header, payload)


@given(U32, st.integers(-(1 << 31), (1 << 31) - 1))
def test_serial_distance_is_the_step_between(a: int, d: int) -> None:
    assert serial_distance((a + d) & 0xFFFFFFFF, a) == d
    assert serial_distance(op_label(1 << 22, 0), op_label((1 << 22) - 1, 1023)) == 1
    with pytest.raises(ValueError, match="op index 1024"):
        op_label(0, 1024)


@given(st.integers(0, (1 << 22) - 1), st.integers(0, schema.OP_PER_STEP - 1), st.integers(0, schema.OP_PER_STEP - 1))
def test_ops_of_neighbouring_steps_have_places_of_their_own(step: int, i: int, j: int) -> None:
    places = {op_slot(op_label(step + s, k)) for s in range(schema.OP_STEPS) for k in {i, j}}
    assert len(places) == schema.OP_STEPS * len({i, j})
    assert all(0 <= p < schema.OP_RING for p in places)
