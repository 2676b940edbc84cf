"""Every kind of broken file or row is one sentence that names file, place, value and remedy; `skip` counts rows."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from written import arrow_table, raw_rows, write_orc, write_parquet, write_tsv

from cdlrm.data import open_source
from cdlrm.errors import DataError

LINE = "1\t" + "\t".join(["5"] * 13) + "\t" + "\t".join(["0000000a"] * 26) + "\n"


def read(path: Path | str | list, **settings: Any) -> int:
    return sum(b.size for b in open_source(path, batch_size=4, **settings))


def refused(path: Any, *words: str, **settings: Any) -> None:
    with pytest.raises(DataError) as info:
        read(path, **settings)
    message = str(info.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_missing_empty_and_unknown(tmp_path: Path) -> None:
    (tmp_path / "empty.tsv").touch()
    (tmp_path / "x.json").write_text("{}")
    (tmp_path / "sub").mkdir()
    refused(tmp_path / "no.orc", "no.orc", "no such file")
    refused(tmp_path / "empty.tsv", "empty.tsv", "empty (0 bytes)")
    refused(tmp_path / "x.json", ".json", ".parquet", ".orc", ".tsv")
    refused(str(tmp_path / "*.orc"), "*.orc", "no file matches")
    refused(tmp_path / "sub", "no data file")
    refused([], "no data files")


def test_content_of_another_kind(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", raw_rows(3))
    write_tsv(tmp_path / "a.tsv", raw_rows(3))
    refused([tmp_path / "a.parquet", tmp_path / "a.tsv"], "a.tsv", "one format")
    (tmp_path / "p.orc").write_bytes((tmp_path / "a.parquet").read_bytes())
    refused(tmp_path / "p.orc", "Parquet", "ORC")
    (tmp_path / "p.tsv").write_bytes((tmp_path / "a.parquet").read_bytes())
    refused(tmp_path / "p.tsv", "Parquet", "text")
    (tmp_path / "t.parquet").write_bytes((tmp_path / "a.tsv").read_bytes())
    refused(tmp_path / "t.parquet", "text or unknown", "Parquet")
    (tmp_path / "z.tsv").write_bytes(b"\x1f\x8b\x08\x00rest")
    refused(tmp_path / "z.tsv", "gzip", "unpack")


@pytest.mark.parametrize("write", [write_parquet, write_orc])
@pytest.mark.parametrize("keep", [0.001, 0.5, 0.99])
@pytest.mark.parametrize("bad_rows", ["raise", "skip"])
def test_truncated(tmp_path: Path, write: Callable, keep: float, bad_rows: str) -> None:
    path = tmp_path / ("x.parquet" if write is write_parquet else "x.orc")
    write(path, raw_rows(500))
    data = path.read_bytes()
    path.write_bytes(data[: max(4, int(len(data) * keep))])
    refused(path, path.name, "truncated or damaged", bad_rows=bad_rows)


@pytest.mark.parametrize("write", [write_parquet, write_orc])
def test_damaged_in_the_middle(tmp_path: Path, write: Callable) -> None:
    path = tmp_path / ("x.parquet" if write is write_parquet else "x.orc")
    write(path, raw_rows(500))
    data = bytearray(path.read_bytes())
    for at in range(100, len(data) // 2):
        data[at] ^= 0xA5
    path.write_bytes(bytes(data))
    refused(path, path.name)


@pytest.mark.parametrize("write", [write_parquet, write_orc])
def test_columns(tmp_path: Path, write: Callable) -> None:
    end = ".parquet" if write is write_parquet else ".orc"
    good, raw = tmp_path / f"a{end}", raw_rows(5)
    write(good, raw)
    cases: dict[str, tuple[dict, str]] = {
        "nolabel": ({k: v for k, v in raw.items() if k != "label"}, "no column 'label'"),
        "gap": ({k: v for k, v in raw.items() if k != "c7"}, "'c7' is missing"),
        "none": ({"label": raw["label"], "x": raw["i1"]}, "no columns i1… or c1…"),
    }
    for name, (columns, words) in cases.items():
        write(tmp_path / f"{name}{end}", columns)
        refused(tmp_path / f"{name}{end}", name, words)
    fewer = {k: v for k, v in raw.items() if k != "c26"}
    write(tmp_path / f"b{end}", fewer)
    refused([good, tmp_path / f"b{end}"], f"b{end}", "no column 'c26'")
    write(tmp_path / f"zero{end}", {k: [] for k in raw})
    refused(tmp_path / f"zero{end}", "no rows")


def test_types(tmp_path: Path) -> None:
    table = arrow_table(raw_rows(3, num_dense=1, num_sparse=1))
    for column, values in (
        ("c1", pa.array([1.5, 2, 3])),
        ("c1", pa.array(["a", "b", "c"])),
        ("i1", pa.array(["1", "2", "3"])),
    ):
        changed = table.set_column(table.column_names.index(column), column, values)
        pa.parquet.write_table(changed, tmp_path / "x.parquet")
        refused(tmp_path / "x.parquet", f"'{column}'", "type", str(values.type))


@pytest.mark.parametrize("write", [write_parquet, write_orc])
@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("label", 2, "is 2"),
        ("label", None, "missing"),
        ("i3", float("nan"), "nan"),
        ("i3", float("inf"), "inf"),
        ("i3", float("-inf"), "-inf"),
        ("c5", 100, "is 100, outside [0, 100)"),
        ("c5", -1, "is -1"),
        ("c5", 2**31, str(2**31)),
        ("c5", 2**40, str(2**40)),
        ("c5", 2**63 - 1, str(2**63 - 1)),
        ("c5", [3, 100], "is 100"),
        ("i3", [1.0, 2.0], "list of 2"),
    ],
)
def test_bad_rows(tmp_path: Path, write: Callable, column: str, value: Any, words: str) -> None:
    path = tmp_path / ("x.parquet" if write is write_parquet else "x.orc")
    raw = raw_rows(250)
    for f in range(26):
        raw[f"c{f + 1}"] = [i % 100 for i in range(250)]
    raw[column][237] = value
    write(path, raw, lists=True)
    how: dict[str, Any] = {"table_rows": 100, "ids": "rows"}
    refused(path, path.name, "row 237", f"'{column}'", words, "bad_rows='skip'", **how)
    source = open_source(path, batch_size=100, bad_rows="skip", **how)
    assert [b.size for b in source] == [100, 100, 49] and source.skipped_rows == 1
    (named,) = source.bad_examples
    assert named.startswith(f"{path}: row 237 (from 0): column '{column}' ") and words in named and ";" not in named
    assert read(path, row_range=(0, 237), **how) == 237


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", ("1 columns where 40",)),
        (LINE[:-1] + "\tx", ("41 columns where 40",)),
        (LINE[:-10], ("39 columns where 40",)),
        (LINE.replace("1\t", "label\t", 1)[:-1], ("label is 'label'", "header")),
        (LINE.replace("1\t", "2\t", 1)[:-1], ("label is '2'",)),
        (LINE.replace("1\t", "\t", 1)[:-1], ("label is ''",)),
        (LINE.replace("\t5", "\tfive", 1)[:-1], ("i1 is 'five'", "integer")),
        (LINE.replace("\t5", "\t5.5", 1)[:-1], ("i1 is '5.5'", "integer")),
        (LINE.replace("\t5", "\t-", 1)[:-1], ("i1 is '-'", "integer")),
        (LINE.replace("\t5", "\t" + "9" * 19, 1)[:-1], ("i1 is '999", "18 digits")),
        (LINE.replace("0000000a", "0000000g", 1)[:-1], ("'c1' is '0000000g'", "hexadecimal")),
        (LINE.replace("0000000a", "0" * 17, 1)[:-1], ("'c1' is '000", "hexadecimal")),
        (LINE.replace("\t", ",")[:-1], ("1 columns where 40", "TAB")),
    ],
)
def test_bad_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, words: tuple[str, ...]) -> None:
    monkeypatch.setattr("cdlrm.data.tsv.PIECE_BYTES", 1000)
    path = tmp_path / "x.tsv"
    path.write_text(LINE * 11 + line + "\n" + LINE * 5)
    refused(path, "x.tsv: line 12: ", "bad_rows='skip'", *words)
    source = open_source(path, batch_size=4, bad_rows="skip")
    assert [b.size for b in source] == [4, 4, 4, 4] and source.skipped_rows == 1
    (named,) = source.bad_examples
    assert named.startswith(f"{path}: line 12: ") and words[0] in named and "bad_rows" not in named
    state = source.state_dict()
    again = open_source(path, batch_size=4, bad_rows="skip")
    again.load_state_dict(state)
    assert list(again) == [] and again.skipped_rows == 1
    path.write_text(line + "\n" + LINE * 3)
    refused(path, "x.tsv", "line 1")
    assert read(path, bad_rows="skip") == 3


@pytest.mark.parametrize("packed", [False, True])
def test_the_first_bad_lines_are_named_and_the_rest_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, packed: bool
) -> None:
    monkeypatch.setattr("cdlrm.data.tsv.PIECE_BYTES", 2000)
    monkeypatch.setattr("cdlrm.data.tsv.PACKED_PIECE_BYTES", 40)
    path = tmp_path / ("x.tsv.gz" if packed else "x.tsv")
    text = "".join((LINE * 3 + f"bad {n}\n") for n in range(20)).encode()
    path.write_bytes(gzip.compress(text) if packed else text)
    source = open_source(path, batch_size=4, bad_rows="skip")
    batches = iter(source)
    for _ in range(10):
        next(batches)
    state = source.state_dict()
    assert sum(b.size for b in batches) == 20 and source.skipped_rows == 20
    assert [named.split(": ")[1] for named in source.bad_examples] == [f"line {4 * n}" for n in range(1, 6)]
    assert sum("is left out" in r.message for r in caplog.records) == 5
    assert "only counted" in caplog.records[-1].message
    list(source)  # another epoch names nothing twice
    assert len(source.bad_examples) == len(caplog.records) == 5
    again = open_source(path, batch_size=4, bad_rows="skip")
    again.load_state_dict(state)
    assert sum(b.size for b in again) == 20 and again.skipped_rows == 20
    assert again.bad_examples and all("1 columns where 40" in named for named in again.bad_examples)
    train = source.restricted((0, 40))
    list(train)
    assert train.bad_examples == source.bad_examples and train.bad_examples is not source.bad_examples


def test_text_range_truncated_and_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.tsv"
    path.write_text(LINE * 3)
    refused(path, "line 1", "'c2' is 10, outside [0, 10)", "vocabulary", table_rows="11-10" + "-11" * 24, ids="rows")
    path.write_text((LINE * 3)[:-5])
    refused(path, "line 3", "truncated")
    assert read(path, bad_rows="skip") == 2
    path.write_text((LINE * 3)[:-30])
    refused(path, "line 3", "columns where 40")
    path.write_bytes(bytes(range(1, 256)) * 20)
    refused(path, "x.tsv: line 1 has")
    monkeypatch.setattr("cdlrm.data.tsv.PIECE_BYTES", 1000)
    path.write_bytes(LINE.encode() + b"\x00\xff" * 2**20)
    refused(path, "x.tsv", "more than")
