"""Language data gives the same records in every form; errors name the row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from language_case import chat

from dpfed.data.language import input_columns
from dpfed.data.sources.hub import Hub
from dpfed.data.sources.in_memory import source_of
from dpfed.data.sources.text_table import TextTable
from dpfed.errors import DpfedError

CHATS = [chat("a", "b"), chat("c", "d", "e", "f"), chat("g", "h")]
TEST = [{"messages": chat("x", "y")}]
COMPLETIONS = [{"prompt": "a", "completion": "b"}, {"prompt": "c d", "completion": "e"}]


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def table(tmp_path: Path, rows: list[dict[str, Any]], test: list[Any] | None = None, **keys: Any):
    path = jsonl(tmp_path / "train.jsonl", rows)
    test_path = jsonl(tmp_path / "test.jsonl", rows if test is None else test)
    return TextTable(path=path, test_path=test_path, **keys).load()


def chats_of(source: Any) -> list[Any]:
    return [json.loads(text) for text in source.train.inputs["messages"]]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".csv"])
def test_each_file_format_gives_the_same_chats(suffix: str, tmp_path: Path) -> None:
    rows = [{"messages": messages, "site": "x"} for messages in CHATS]
    path = tmp_path / f"train{suffix}"
    if suffix == ".jsonl":
        jsonl(path, rows)
    elif suffix == ".parquet":
        pa = pytest.importorskip("pyarrow", reason="the parquet extra is not installed")
        parquet = pytest.importorskip("pyarrow.parquet")
        # Parquet gives every message every field.
        rows[0] = {**rows[0], "messages": [{**m, "name": "n"} for m in CHATS[0]]}
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        packed = [{**row, "messages": json.dumps(row["messages"])} for row in rows]
        pandas.DataFrame(packed).to_csv(path, index=False)
    test_path = jsonl(tmp_path / "test.jsonl", TEST)
    source = TextTable(path=str(path), test_path=test_path).load()
    assert chats_of(source)[1:] == CHATS[1:]
    assert [m["content"] for m in chats_of(source)[0]] == ["a", "b"]
    assert (source.classes, source.kind, source.declared) == ((), "text", True)
    assert source.train.columns["site"].tolist() == ["x"] * 3
    assert source.train.labels.tolist() == [0, 0, 0]


def test_python_data_gives_the_same_chats() -> None:
    datasets = pytest.importorskip("datasets", reason="the hub extra is not installed")

    records = [{"messages": messages} for messages in CHATS]
    for train in (
        records,
        {"messages": CHATS},
        pandas.DataFrame(records),
        datasets.Dataset.from_list(records),
        {"here": records[:1], "there": records[1:]},
    ):
        source = source_of(train, TEST)
        assert chats_of(source) == CHATS
        assert (source.classes, source.kind) == ((), "text")
    assert source.clients == ("here", "there")


def test_completions_are_read_from_files_and_programs(tmp_path: Path) -> None:
    for source in (
        table(tmp_path, COMPLETIONS),
        source_of(COMPLETIONS, [*COMPLETIONS]),
        source_of(pandas.DataFrame(COMPLETIONS), [*COMPLETIONS]),
    ):
        inputs = {name: x.tolist() for name, x in source.train.inputs.items()}
        assert inputs == {"prompt": ["a", "c d"], "completion": ["b", "e"]}
        assert source.classes == ()
    rows = [{"question": "a", "answer": "b"}]
    source = table(tmp_path, rows, prompt="question", completion="answer")
    assert source.train.inputs["completion"].tolist() == ["b"]


def test_texts_without_labels(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": "b"}]
    for source in (table(tmp_path, rows), source_of(rows, [*rows])):
        assert source.train.inputs["text"].tolist() == ["a", "b"]
        assert source.classes == ()
    labelled = [{**row, "label": i} for i, row in enumerate(rows)]
    assert table(tmp_path, labelled).classes == ("0", "1")
    assert table(tmp_path, labelled, label="").classes == ()


def test_the_hub_reads_chats(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the hub extra is not installed")

    parts = {"train": [{"chat": c} for c in CHATS], "test": [{"chat": CHATS[0]}]}
    saved = {name: datasets.Dataset.from_list(rows) for name, rows in parts.items()}
    datasets.DatasetDict(saved).save_to_disk(str(tmp_path / "d"))
    source = Hub(dataset=str(tmp_path / "d"), messages="chat").load()
    assert chats_of(source) == CHATS
    assert source.classes == ()
    with pytest.raises(DpfedError, match="set exactly one of data"):
        Hub(dataset=str(tmp_path / "d"), messages="chat", image="chat").load()


def test_the_same_columns_have_another_fingerprint_as_completions(tmp_path: Path) -> None:
    rows = [{"a": "x", "b": "y"}]
    keys = ({"text": "a", "text_pair": "b"}, {"prompt": "a", "completion": "b"})
    first, second = (table(tmp_path, rows, **key) for key in keys)
    assert first.fingerprint != second.fingerprint


@pytest.mark.parametrize(
    ("stated", "found", "columns"),
    [
        ({}, ["text", "label"], {"text": "text"}),
        ({}, ["messages", "prompt"], {"messages": "messages"}),
        ({"text": "text"}, ["text", "messages"], {"text": "text"}),
        ({"text_pair": "b"}, ["text", "b"], {"text": "text", "text_pair": "b"}),
        ({"prompt": "q"}, [], {"prompt": "q", "completion": "completion"}),
        ({}, [], {"text": "text"}),
    ],
)
def test_columns_are_stated_or_found(
    stated: dict[str, Any], found: list[str], columns: dict[str, str]
) -> None:
    assert input_columns(stated, found, "t") == columns


def system(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": []}, "are not a list with at least one message"),
        ({"messages": None}, "are not a list with at least one message"),
        ({"messages": "hello"}, "are not JSON"),
        ({"messages": ["hello"]}, "a message of .* is str: give 'role' and 'content'"),
        ({"messages": [{"content": "a"}]}, "needs a text as 'role'"),
        ({"messages": [{"role": "user", "content": [1]}]}, "needs a text as 'role'"),
        ({"messages": chat("a")}, "none with role 'assistant'"),
        ({"messages": system(" ")}, "has an empty message of the assistant: mend or drop"),
        ({"prompt": "a", "completion": " "}, "an empty text in column 'completion'"),
        ({"prompt": "", "completion": "b"}, "an empty text in column 'prompt'"),
        (
            {"text": "a", "messages": chat("a", "b")},
            "has the columns text and messages, and a record is one of them",
        ),
    ],
)
def test_bad_records_are_one_sentence(row: dict[str, Any], words: str, tmp_path: Path) -> None:
    good = {
        name: {"messages": chat("a", "b"), "prompt": "a", "completion": "b", "text": "a"}[name]
        for name in row
    }
    place = "" if "record is one" in words else "line 2 of .*train.jsonl"
    with pytest.raises(DpfedError, match=words) as stopped:
        table(tmp_path, [good, row])
    assert not place or "line 2 of " in str(stopped.value)
    with pytest.raises(DpfedError, match=words) as stopped:
        source_of([good, row], [good])
    assert not place or "row 1 of train" in str(stopped.value)


def test_a_call_of_a_tool_needs_no_words() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    source = source_of([{"messages": [{"role": "user", "content": "a"}, call]}], TEST)
    assert chats_of(source)[0][1] == {**call, "content": ""}


def test_records_of_several_forms_are_refused(tmp_path: Path) -> None:
    """In JSON lines, each line has its own keys."""
    rows = [{"text": "a"}, {"messages": chat("a", "b")}]
    with pytest.raises(DpfedError, match=r"columns text and messages.*such as data\.text"):
        table(tmp_path, rows)
    with pytest.raises(DpfedError, match="record 1 of train has messages and record 0 has text"):
        source_of(rows, TEST)
    keys = {"text": "text", "messages": "messages"}
    with pytest.raises(DpfedError, match="columns text and messages"):
        input_columns(keys, [], "t")
    with pytest.raises(DpfedError, match="text_pair has no effect with prompt"):
        input_columns({"prompt": "p", "text_pair": "b"}, [], "t")


def test_columns_of_unequal_length_are_refused() -> None:
    uneven = {"prompt": ["a", "b"], "completion": np.array(["c"], dtype=object)}
    with pytest.raises(DpfedError, match="train has 2 records and 1 of completion"):
        source_of(uneven, COMPLETIONS)


def test_a_list_of_texts_is_a_table() -> None:
    source = source_of(["a b", "c"], ["d"])
    assert source.train.inputs["text"].tolist() == ["a b", "c"]
    assert source.classes == ()


@pytest.mark.parametrize("row", [{"prompt": "a"}, {"completion": "a", "client": 1}])
def test_prompts_without_completions_are_one_sentence(row: dict[str, Any]) -> None:
    with pytest.raises(DpfedError, match=r"without '(completion|prompt)'"):
        source_of({name: [value] * 4 for name, value in row.items()}, COMPLETIONS)


@pytest.mark.parametrize("column", ["prompt", "completion"])
def test_a_file_without_completions_is_one_sentence(column: str, tmp_path: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / f"{part}.jsonl").write_text(json.dumps({column: "a"}) + "\n")
    with pytest.raises(DpfedError, match=f"has the column '{column}' without"):
        TextTable(path=str(tmp_path)).load()


def test_tables_of_different_forms_are_one_sentence() -> None:
    words = "a record of train has prompt and completion and one of test has messages: give both"
    with pytest.raises(DpfedError, match=words):
        source_of(COMPLETIONS, [{"messages": chat} for chat in CHATS])
