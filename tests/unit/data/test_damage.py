"""Files changed at random give a whole data set or an error of one sentence."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import makers
import pytest
from data_files_case import CASES
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfed.errors import DpfedError

EXAMPLES = int(os.environ.get("DPFED_FUZZ_EXAMPLES", "12"))


def spoil(data: st.DataObject, content: bytes) -> bytes:
    how = data.draw(st.sampled_from(["cut", "random", "bytes", "insert", "repeat"]))
    if how == "random":
        return data.draw(st.binary(max_size=200))
    at = data.draw(st.integers(0, max(len(content) - 1, 0)))
    if how == "cut":
        return content[:at]
    if how == "insert":
        return content[:at] + data.draw(st.binary(min_size=1, max_size=8)) + content[at:]
    if how == "repeat":
        return content + content[at:]
    out = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, min(len(out) - 1, 400)) | st.integers(0, len(out) - 1))
        out[place] = data.draw(st.integers(0, 255))
    return bytes(out)


@pytest.mark.parametrize("case", CASES)
def test_only_a_sentence_comes_out(case: str) -> None:
    files, section = CASES[case]

    @settings(max_examples=EXAMPLES, database=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(files)))
        with tempfile.TemporaryDirectory() as folder:
            makers.write(Path(folder), {**files, name: spoil(data, files[name])})
            source, sentence = None, ""
            try:
                source = section(folder).load()
            except DpfedError as error:
                sentence = str(error)
            if source is None:
                assert sentence
                assert "\n" not in sentence
            else:
                assert len(source.train) > 0
                if source.classes:
                    assert source.train.labels.max() < len(source.classes)
                else:
                    # Only a text may have no label column; its labels are all 0.
                    assert source.kind == "text"
                    assert not source.train.labels.any()

    check()
