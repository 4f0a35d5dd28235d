"""Write the tables of the language model studies from SST-2.

python experiments/review_tables.py SST-2 WEIGHTS DIR

SST-2    folder with train.tsv and dev.tsv
WEIGHTS  folder of the language model
DIR      folder for the tables: reviews-train.jsonl with the column `text`, sentiment-train.jsonl
         with the columns `prompt` and `completion`, and both of the development set, named
         -dev.jsonl; and for `tokenizer`, whose end token is the one with which texts begin

The small Llama has never seen its own end token, and it ends a story with the first token of the
next one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

# Sentences of the language modelling study have at least this many words.
FEWEST_WORDS = 8
# Number of words in a record of the sentiment study, so that its prompt fits into 40 tokens.
WORDS_OF_PROMPT = range(4, 17)
ANSWERS = {"0": " bad", "1": " good"}


def rows_of(path: Path) -> list[tuple[str, str]]:
    """Return the sentences and labels of a published file, whose cells have no quotation marks."""
    _, *lines = path.read_text(encoding="utf-8").splitlines()
    cells = [line.split("\t") for line in lines]
    return [(sentence.strip(), label) for sentence, label in cells]


def reviews(rows: Iterable[tuple[str, str]]) -> Iterator[dict[str, str]]:
    for sentence, _ in rows:
        if len(sentence.split()) >= FEWEST_WORDS:
            yield {"text": sentence}


def sentiments(rows: Iterable[tuple[str, str]]) -> Iterator[dict[str, str]]:
    for sentence, label in rows:
        if len(sentence.split()) in WORDS_OF_PROMPT:
            yield {"prompt": f"Review: {sentence} Sentiment:", "completion": ANSWERS[label]}


def write(path: Path, records: Iterable[dict[str, str]]) -> int:
    """Write a record to each line; return the number of records."""
    lines = [json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


def write_tokenizer(weights: str, out: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(weights)
    tokenizer.eos_token = tokenizer.bos_token
    tokenizer.save_pretrained(out)


def main(source: str, weights: str, out: str) -> None:
    Path(out).mkdir(parents=True, exist_ok=True)
    write_tokenizer(weights, Path(out) / "tokenizer")
    for part in ("train", "dev"):
        rows = rows_of(Path(source) / f"{part}.tsv")
        for name, make in (("reviews", reviews), ("sentiment", sentiments)):
            path = Path(out) / f"{name}-{part}.jsonl"
            print(f"{path}: {write(path, make(rows))} records")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
