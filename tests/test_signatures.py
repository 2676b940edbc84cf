"""The table of kernels: what is packed, what is refused, and the text it names."""

from __future__ import annotations

import numpy as np
import pytest

from cdlrm.driver import signatures, sources
from cdlrm.driver.signatures import KERNELS, TYPES, blocks, check, expression, pack, steps_held

COMBINE = {"first": 4096, "first_number": 1, "second": 8192, "second_number": 2, "flag": 64, "number": 3}


def test_pack_types_every_value_in_order() -> None:
    packed = pack("combine", COMBINE)
    assert [value.item() for value in packed] == [4096, 1, 8192, 2, 64, 3]
    assert [value.dtype.name for value in packed] == ["uint64", "int32", "uint64", "int32", "uint64", "int32"]
    check("combine", packed)
    finite = pack("finite", {"grad": 2**63, "count": 2**40, "number": np.int64(7), "flag": 16, "sticky": None})
    assert [value.item() for value in finite] == [2**63, 2**40, 7, 16, 0, 0]
    check("finite", finite)


def test_pack_of_all_kernels_passes_the_check() -> None:
    for name, kernel in KERNELS.items():
        values = {parameter: 1.5 if TYPES[kind].kind == "f" else 1 for parameter, kind in kernel.parameters}
        check(name, pack(name, values))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({**COMBINE, "wrong": 1}, "wrong"),
        ({key: value for key, value in COMBINE.items() if key != "number"}, "number"),
        ({**COMBINE, "number": 1.0}, "number"),
        ({**COMBINE, "first": "here"}, "first"),
    ],
)
def test_pack_refuses(values: dict, named: str) -> None:
    with pytest.raises(TypeError, match=f"'combine'.*{named}"):
        pack("combine", values)


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_pack_refuses_an_integer_that_does_not_fit(value: int) -> None:
    with pytest.raises(OverflowError):
        pack("combine", {**COMBINE, "number": value})


@pytest.mark.parametrize("wrong", [3, 3.0, True, np.int64(3), np.uint32(3), np.float32(3), np.int16(3), "3", None])
def test_check_refuses_what_cupy_would_pass_as_another_type(wrong: object) -> None:
    """A Python int is 8 bytes, a bool 1, a float a double."""
    good = pack("combine", COMBINE)
    with pytest.raises(TypeError, match=r"'combine'.*'number'.*i32"):
        check("combine", [*good[:5], wrong])
    with pytest.raises(TypeError, match="takes 6"):
        check("combine", good[:5])


def test_check_takes_a_python_int_where_8_bytes_are_read() -> None:
    check("stream_copy", [4096, 8192, 10])
    with pytest.raises(TypeError, match="'target'"):
        check("stream_copy", [4096.0, 8192, 10])


def test_expressions_name_each_variant_once() -> None:
    assert expression("lookup", (4, 2, "float")) == "lookup<4,2,float>"
    assert expression("combine", ()) == "combine_flags"
    names = [expression(name, variant) for name, kernel in KERNELS.items() for variant in kernel.variants]
    assert len(names) == len(set(names))
    with pytest.raises(TypeError, match="no variant"):
        expression("lookup", (2, 2, "float"))


def test_grids_and_tiles() -> None:
    assert [blocks(4, owners) for owners in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert [blocks(1, owners) for owners in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [steps_held(dim) for dim in (1, 32, 33, 64, 65, 128, 4096)] == [1, 1, 2, 2, 4, 4, 4]


def test_source_has_each_header_once_and_constants_agree() -> None:
    for file in {kernel.file for kernel in KERNELS.values()}:
        text = sources.source(file)
        assert '#include "' not in text
        assert text.count("#define CDLRM_COMMON_CUH") == 1
        assert f"constexpr int BLOCK_THREADS = {signatures.BLOCK_THREADS};" in text
        assert f'#line 1 "{file}"' in text and '#line 1 "common.cuh"' in text
    assert f"constexpr int CHUNK = {signatures.LONG_ROW};" in sources.source("update.cu")
    with pytest.raises(FileNotFoundError):
        sources.source("none.cu")


def test_line_directives_keep_the_files_own_line_numbers() -> None:
    for file in {kernel.file for kernel in KERNELS.values()}:
        own = (sources.folder() / file).read_text(encoding="utf-8").splitlines()
        at, current = 0, ""
        for line in sources.source(file).splitlines():
            if line.startswith("#line "):
                at, current = int(line.split()[1]), line.split('"')[1]
                continue
            if current == file:
                assert own[at - 1] == line or own[at - 1].startswith("#include"), (file, at)
            at += 1
