"""Tables of texts give the same records in every format; errors name the row."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpfed.data.sources.text_table import TextTable
from dpfed.errors import DpfedError

ROWS = [
    {"text": 'he said "no", twice', "label": "bad", "site": "x", "age": 3},
    {"text": "two\nlines", "label": "good", "site": "y", "age": 4},
    {"text": "ünïcode", "label": "bad", "site": "x", "age": 5},
]
CSV = (
    'text,label,site,age\r\n"he said ""no"", twice",bad,x,3\r\n'
    '"two\nlines",good,y,4\r\nünïcode,bad,x,5\r\n'
)
TEST = "text,label\nfine,good\n"


def load(
    tmp_path: Path, content: str | bytes, suffix: str = ".csv", test: str = TEST, **section: Any
) -> Any:
    path, test_path = tmp_path / f"train{suffix}", tmp_path / "test.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    test_path.write_bytes(test.encode())
    return TextTable(path=str(path), test_path=str(test_path), **section).load()


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_each_format_gives_the_same_records(tmp_path: Path, suffix: str) -> None:
    content: str | bytes = CSV
    if suffix == ".jsonl":
        content = "\n".join(json.dumps(row) for row in ROWS) + "\n\n"
    elif suffix == ".parquet":
        pa = pytest.importorskip("pyarrow", reason="the parquet extra is not installed")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "t.parquet")
        content = (tmp_path / "t.parquet").read_bytes()
    source = load(tmp_path, content, suffix, client_column="site")
    assert source.kind == "text"
    assert source.train.inputs["text"].tolist() == [row["text"] for row in ROWS]
    assert source.train.labels.tolist() == [0, 1, 0]
    assert source.classes == ("bad", "good")
    assert not source.declared
    assert source.train.columns["site"].tolist() == ["x", "y", "x"]
    assert [int(a) for a in source.train.columns["age"]] == [3, 4, 5]
    assert source.test.inputs["text"].tolist() == ["fine"]


@pytest.mark.parametrize(("separator", "name"), [(";", "semicolon"), ("\t", "tab")])
def test_a_csv_may_have_other_separators(tmp_path: Path, separator: str, name: str) -> None:
    """Spreadsheets write semicolons wherever a comma is the decimal point."""
    rows = [
        ["text", "label", "site"],
        [f'"a, 1,5{separator} b"', "good", "x"],
        ["c, d", "bad", "y"],
    ]
    content = "".join(separator.join(row) + "\r\n" for row in rows)
    source = load(tmp_path, b"\xef\xbb\xbf" + content.encode(), client_column="site")
    assert source.train.inputs["text"].tolist() == [f"a, 1,5{separator} b", "c, d"]
    assert source.train.columns["site"].tolist() == ["x", "y"]
    assert source.notes == (f"{tmp_path / 'train.csv'} is read with a {name} between columns",)
    with pytest.raises(DpfedError, match=f"line 2 of .* is not {name}-separated text"):
        load(tmp_path, f'text{separator}label\n"open{separator}good\n')


def test_a_csv_of_one_column_has_commas(tmp_path: Path) -> None:
    source = load(tmp_path, "text\na; b\n", test="text\nc\n", label="")
    assert source.train.inputs["text"].tolist() == ["a; b"]
    assert source.notes == ()


def test_tsv_has_no_quoting(tmp_path: Path) -> None:
    source = load(tmp_path, 'text\tlabel\n"open\tgood\nb"c\tbad\n', ".tsv")
    assert source.train.inputs["text"].tolist() == ['"open', 'b"c']


def test_pairs(tmp_path: Path) -> None:
    rows = "q,a,y\nwhy,so,0\n"
    source = load(tmp_path, rows, test=rows, text="q", text_pair="a", label="y")
    assert source.train.inputs["text_pair"].tolist() == ["so"]


def test_a_natural_partition_by_a_column(tmp_path: Path) -> None:
    from dpfed.data.partition import partition

    section = TextTable(partition="natural", client_column="site")
    source = load(tmp_path, CSV, client_column="site", partition="natural")
    shards = partition(section, source.train, np.random.default_rng(0))
    assert [shards.of(i).tolist() for i in range(2)] == [[0, 2], [1]]


NUMBERS = "text,label\na,0\nb,2\n"


@pytest.mark.parametrize(
    ("rows", "classes", "names", "labels"),
    [
        (NUMBERS, None, ("0", "1", "2"), [0, 2]),
        (NUMBERS, 5, ("0", "1", "2", "3", "4"), [0, 2]),
        (NUMBERS, ("x", "y", "z"), ("x", "y", "z"), [0, 2]),  # numbers of the named classes
        ("text,label\na,z\nb,x\n", ("x", "y", "z"), ("x", "y", "z"), [2, 0]),
        (
            "text,label\na,2\nb,0\n",
            ("2", "1", "0"),
            ("2", "1", "0"),
            [0, 2],
        ),  # names that are numbers are names
        ("text,label\na, good \nb,bad\n", None, ("bad", "good"), [1, 0]),
        ("text,label\na,01\nb,1\n", None, ("01", "1"), [0, 1]),
    ],
)
def test_labels(
    tmp_path: Path, rows: str, classes: Any, names: tuple[str, ...], labels: list[int]
) -> None:
    source = load(tmp_path, rows, test=rows, classes=classes)
    assert source.classes == names
    assert source.train.labels.tolist() == labels
    assert source.declared == (classes is not None)


def test_labels_of_json_may_be_numbers_or_truth_values(tmp_path: Path) -> None:
    rows = '{"text": "a", "label": true}\n{"text": "b", "label": 0}\n{"text": "c", "label": 1.0}\n'
    assert load(tmp_path, rows, ".jsonl", test="text,label\na,1\n").train.labels.tolist() == [
        1,
        0,
        1,
    ]


def test_no_labels_for_language_modelling(tmp_path: Path) -> None:
    source = load(tmp_path, "text\na\nb\n", test="text\nc\n", label="")
    assert source.train.labels.tolist() == [0, 0]
    assert source.declared


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    first = load(tmp_path, CSV).fingerprint
    assert load(tmp_path, CSV).fingerprint == first
    assert load(tmp_path, CSV + "more,bad,x,1\n").fingerprint != first
    assert load(tmp_path, CSV, test=TEST + "more,good\n").fingerprint != first


@pytest.mark.parametrize(
    ("content", "suffix", "section", "words"),
    [
        (
            "text,label\ngood,1\n,0\n",
            ".csv",
            {},
            "line 3 of .*train.csv has an empty text in column 'text'",
        ),
        ("text,label\na,1\n   ,0\n", ".csv", {}, "line 3 of .* has an empty text"),
        ("text,label\na,1\nb,\n", ".csv", {}, "line 3 of .*train.csv has no label"),
        ('text,label\n"a\nb",1\nc,\n', ".csv", {}, "line 4 of .*train.csv has no label"),
        (
            "text,label\na,1\nb,7\n",
            ".csv",
            {"classes": 2},
            "line 3 of .* has label '7'; it must be a whole number from 0 to 1",
        ),
        ("text,label\na,1\nb,-1\n", ".csv", {"classes": 2}, "line 3 of .* has label '-1'"),
        ("text,label\na,1\nb,9999999\n", ".csv", {}, "show 10,000,000 classes"),
        (
            "text,label\na,cat\n",
            ".csv",
            {"classes": ("dog", "emu")},
            r"line 2 .* has label 'cat'; .*\(dog, emu\)",
        ),
        ("text,label\na,1\nb,1,2\n", ".csv", {}, "line 3 of .* has 3 columns, the first line 2"),
        ("text,label\na,1\nb\n", ".csv", {}, "line 3 of .* has 1 columns"),
        ('text,label\na,1\n"open,1\n', ".csv", {}, "line 3 of .* is not comma-separated text"),
        ("text,text\na,1\n", ".csv", {}, "two columns 'text'"),
        (
            "note,label\na,1\n",
            ".csv",
            {},
            "has no column 'text': set data.text to one of note, label",
        ),
        ("text,y\na,1\n", ".csv", {"label": "x"}, "has no column 'x': set data.label"),
        ("text,y\na,1\n", ".csv", {"classes": 2}, "has no column 'label': set data.label"),
        (b"text,label\na,1\nb\xff,1\n", ".csv", {}, "line 3 of .* is not UTF-8"),
        ("text,label\n", ".csv", {}, "train.csv has no rows"),
        ("", ".csv", {}, "train.csv has no rows"),
        ("", ".tsv", {}, "train.tsv has no rows"),
        ("text\tlabel\na\tb\tc\n", ".tsv", {}, "line 2 of .* has 3 columns"),
        ('{"text": "a", "label": 1}\n{"text": \n', ".jsonl", {}, "line 2 of .* is not JSON"),
        ("[1]\n", ".jsonl", {}, "line 1 of .* is not a JSON object"),
        ("[" * 100_000, ".jsonl", {}, "line 1 of .* is not JSON"),
        (
            '{"text": 5, "label": 1}\n',
            ".jsonl",
            {},
            "line 1 of .* has 5, not a text, in column 'text'",
        ),
        ('{"text": "a", "label": [1]}\n', ".jsonl", {}, "line 1 of .* has no usable label"),
        ('{"text": "a", "label": null}\n', ".jsonl", {}, "line 1 of .* has no label"),
        (
            '{"text": "a", "label": 1}\n{"text": "b", "label": 1, "site": "x"}\n',
            ".jsonl",
            {"client_column": "site"},
            "line 1 of .* has no value in column 'site', which data.client_column needs",
        ),
        (
            '{"text": "a", "label": 1, "site": 2}\n{"text": "b", "label": 1, "site": "x"}\n',
            ".jsonl",
            {"unit_column": "site"},
            "column 'site' of .* must hold texts or numbers, not both",
        ),
        (CSV, ".csv", {"client_column": "ward"}, "has no column 'ward': set data.client_column"),
        (
            "text,label,site\na,1,\n",
            ".csv",
            {"client_column": "site"},
            "line 2 of .* has no value in column 'site'",
        ),
        (CSV, ".xls", {}, "must end in .csv, .tsv, .jsonl, .parquet"),
        (
            b"PAR1 no",
            ".parquet",
            {},
            "train.parquet (cannot be read as Parquet|is a Parquet file: pip install)",
        ),
    ],
)
def test_a_bad_table_is_one_sentence(
    tmp_path: Path, content: Any, suffix: str, section: Any, words: str
) -> None:
    with pytest.raises(DpfedError, match=words) as caught:
        load(tmp_path, content, suffix, test="text,label\nfine,1\n", **section)
    assert "\n" not in str(caught.value)


def test_a_test_set_of_its_own_is_required(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(NUMBERS)
    for section in (TextTable(), TextTable(path=str(path))):
        with pytest.raises(DpfedError, match=r"data.test_path to a public test set"):
            section.load()
    with pytest.raises(DpfedError, match=r"data.test_path is data.path"):
        TextTable(path=str(path), test_path=str(path)).load()
    with pytest.raises(DpfedError, match=r"there is no file .*absent.csv"):
        TextTable(path=str(path), test_path=str(tmp_path / "absent.csv")).load()


def test_a_folder_has_the_tables_train_and_test(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\nfine,1\nbad,0\n")
    section = TextTable(path=str(tmp_path))
    with pytest.raises(DpfedError, match=r"needs one table test.csv, .* and has none: set data"):
        section.load()
    (tmp_path / "test.tsv").write_text("text\tlabel\npoor\t0\n")
    source = section.load()
    assert source.train.inputs["text"].tolist() == ["fine", "bad"]
    assert source.test.inputs["text"].tolist() == ["poor"]
    other = tmp_path / "other.csv"
    other.write_text("text,label\nother,1\n")
    stated = TextTable(path=str(tmp_path), test_path=str(other)).load()
    assert stated.test.inputs["text"].tolist() == ["other"]
    (tmp_path / "test.csv").write_text("text,label\npoor,0\n")
    with pytest.raises(DpfedError, match=r"and has test.csv and test.tsv: set data.path"):
        section.load()


def test_clients_need_no_test_set_and_servers_no_private_records(tmp_path: Path) -> None:
    """Each reads its own table alone, and both tables where both are set."""
    private, public = tmp_path / "own.csv", tmp_path / "public.csv"
    private.write_text("text,label\nfine,1\nbad,0\n")
    public.write_text("text,label\npoor,0\n")
    assert TextTable(path=str(private)).load_train().train.inputs["text"].tolist() == [
        "fine",
        "bad",
    ]
    assert TextTable(test_path=str(public)).load_test().test.inputs["text"].tolist() == ["poor"]
    both = TextTable(path=str(private), test_path=str(public))
    for source in (both.load_train(), both.load_test()):
        assert (len(source.train), len(source.test)) == (2, 1)
    for load_part in (TextTable().load_train, TextTable().load_test):
        with pytest.raises(DpfedError, match=r"set data\.path to the private records"):
            load_part()


def test_parquet_needs_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DpfedError, match=r"pip install 'dpfed\[parquet\]'"):
        load(tmp_path, b"PAR1", ".parquet")
