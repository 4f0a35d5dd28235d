"""GLUE's TSV files with their quirks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import makers
import numpy as np
import pytest

from dpfed.data.sources.glue import Mnli, Qnli, Qqp, Rte, Sst2
from dpfed.errors import DpfedError

TASKS: dict[str, Any] = {"sst2": Sst2, "qqp": Qqp, "qnli": Qnli, "mnli": Mnli, "rte": Rte}


def load(
    tmp_path: Path, task: str, change: dict[str, bytes | None] | None = None, **section: Any
) -> Any:
    files = {
        name: data
        for name, data in {**makers.glue(task), **(change or {})}.items()
        if data is not None
    }
    makers.write(tmp_path / "glue", files)
    return TASKS[task](path=str(tmp_path / "glue"), **{"check": False, **section}).load()


def test_quotes_are_characters_and_only_line_feeds_end_lines(tmp_path: Path) -> None:
    for _ in range(2):  # read, then from the cache
        source = load(tmp_path, "sst2")
        assert source.train.inputs["text"].tolist() == [
            '"quoted at the start',
            "plain ",
            'u2028\u2028inside " here',
        ]
        assert source.train.inputs["text"].dtype == object
        assert source.train.labels.tolist() == [1, 0, 1]
        assert source.test.inputs["text"].tolist() == ["good"]
        assert source.classes == ("negative", "positive")
        assert source.kind == "text"
        assert "text_pair" not in source.train.inputs
        assert len(source.fingerprint) == 64


def test_the_task_folder_itself_will_do(tmp_path: Path) -> None:
    load(tmp_path, "sst2")
    assert len(Sst2(path=str(tmp_path / "glue" / "SST-2"), check=False).load().train) == 3


def test_qqp_leaves_broken_rows_out_and_says_so(tmp_path: Path) -> None:
    for _ in range(2):
        source = load(tmp_path, "qqp")
        assert source.train.inputs["text"].tolist() == ["Is it?", "Why?"]
        assert source.train.inputs["text_pair"].tolist() == ["It is?", ""]
        assert source.train.labels.tolist() == [1, 0]
        assert source.notes == (f"2 broken rows of {tmp_path / 'glue/QQP/train.tsv'} are left out",)


def test_mnli_finds_its_columns_by_name_and_uses_the_matched_set(tmp_path: Path) -> None:
    source = load(tmp_path, "mnli", {"MNLI/dev_mismatched.tsv": b"nonsense"})
    assert source.train.inputs["text"].tolist() == ["A man."]
    assert source.train.labels.tolist() == [0]
    assert source.test.inputs["text_pair"].tolist() == ["Yes."]
    assert source.test.labels.tolist() == [2]
    assert source.classes == ("entailment", "neutral", "contradiction")


@pytest.mark.parametrize("task", ["qnli", "rte"])
def test_pairs(tmp_path: Path, task: str) -> None:
    source = load(tmp_path, task)
    assert source.train.inputs["text"].tolist() == ["Who?", "What?"]
    assert source.train.inputs["text_pair"].tolist() == ["He.", "She."]
    assert source.train.labels.tolist() == [0, 1]


def test_windows_line_ends_and_a_byte_order_mark(tmp_path: Path) -> None:
    change: dict[str, bytes | None] = {
        "SST-2/train.tsv": b"\xef\xbb\xbfsentence\tlabel\r\ngood\t1\r\nbad\t0"
    }
    source = load(tmp_path, "sst2", change)
    assert source.train.inputs["text"].tolist() == ["good", "bad"]
    assert np.array_equal(source.train.labels, [1, 0])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            b"sentence\tlabel\ngood\t1\nstray\ttab\t0\n",
            r"line 3 of .*train.tsv has 3 columns, not 2",
        ),
        (b"sentence\tlabel\ngood\t1\nhalf a ro", r"line 3 of .*train.tsv has 1 columns, not 2"),
        (
            b"sentence\tlabel\ngood\t2\n",
            r"line 2 of .*train.tsv has label '2'; it must be one of 0, 1",
        ),
        (b"sentence\tlabel\ngood\t\n", r"line 2 of .*train.tsv has label ''"),
        (b"sentence\tlabel\nb\xe9d\t0\n", r"line 2 of .*train.tsv is not UTF-8"),
        (b"text\tlabel\ngood\t1\n", r"train.tsv has no column 'sentence'"),
        (b"sentence\tlabel\n", r"train.tsv has no rows"),
        (b"", r"train.tsv has no column 'sentence'"),
    ],
)
def test_a_bad_file_is_one_sentence(
    tmp_path: Path, own_cache: Path, data: bytes, words: str
) -> None:
    with pytest.raises(DpfedError, match=words):
        load(tmp_path, "sst2", {"SST-2/train.tsv": data})
    assert not own_cache.exists() or list(own_cache.iterdir()) == []


def test_a_wrong_column_count_is_forgiven_only_in_qqp(tmp_path: Path) -> None:
    rows = makers.glue("qnli")["QNLI/train.tsv"] + b"2\tbroken\n"
    with pytest.raises(DpfedError, match=r"line 4 of .* has 2 columns, not 4"):
        load(tmp_path, "qnli", {"QNLI/train.tsv": rows})


def test_a_folder_without_training_data_says_so(tmp_path: Path) -> None:
    with pytest.raises(DpfedError, match=r"QNLI has dev.tsv but no train.tsv: .*QNLIv2.zip"):
        load(tmp_path, "qnli", {"QNLI/train.tsv": None})


@pytest.mark.parametrize("task", TASKS)
def test_missing_files_say_where_they_are(tmp_path: Path, task: str) -> None:
    for path in (None, str(tmp_path / "nothing"), str(tmp_path)):
        with pytest.raises(
            DpfedError, match=r"https://dl.fbaipublicfiles.com/glue/data/.*\.zip.*data.path"
        ):
            TASKS[task](path=path).load()


@pytest.mark.parametrize("task", TASKS)
def test_published_counts_are_asked_for(tmp_path: Path, task: str) -> None:
    load(tmp_path, task)
    with pytest.raises(
        DpfedError, match=r"train.tsv has \d records, the published set .*data.check = false"
    ):
        load(tmp_path, task, check=True)
