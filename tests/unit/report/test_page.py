"""The page: seeds are grouped, figures have the right numbers, text never becomes HTML."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_case import SEEDS

from dpfed.errors import DpfedError
from dpfed.privacy.published import plotted_loss, show_loss
from dpfed.report import page
from dpfed.report.labels import apart, labels
from dpfed.report.narrative import cards
from dpfed.report.page import Report, body, json_block, read_report, render
from dpfed.report.run_reader import Group, RunData, grouped, rounds_shown
from dpfed.training.budget.recorded_spending import read_recorded_spending

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'"


@pytest.fixture(scope="module")
def report(runs: list[Path]) -> Report:
    return read_report(runs)


@pytest.fixture(scope="module")
def public(runs: list[Path]) -> Report:
    return read_report(runs, public=True)


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def figure(report: Report, name: str) -> dict[str, Any]:
    return next(f.plain() for f in report.figures if f.id == name)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_runs_that_differ_in_their_seed_are_one_group(report: Report) -> None:
    assert [(g.label, len(g.runs)) for g in report.groups] == [("dp-fedadamw", 2), ("dp-fedavg", 1)]


def test_the_line_is_the_mean_and_the_band_spans_the_seeds(
    report: Report, runs: list[Path]
) -> None:
    by_hand = np.array([[100 * row["accuracy"] for row in lines_of(path)] for path in runs[:2]])
    band, line, other = figure(report, "accuracy")["data"]
    assert line["x"] == [0, 1, 2, 3]
    np.testing.assert_allclose(line["y"], by_hand.mean(0))
    np.testing.assert_allclose(band["y"], [*by_hand.max(0), *by_hand.min(0)[::-1]])
    np.testing.assert_allclose(other["y"], [100 * row["accuracy"] for row in lines_of(runs[2])])


def test_a_run_that_stopped_early_does_not_cut_the_others_short() -> None:
    def data(rounds: int, **more: Any) -> RunData:
        return RunData("", {}, more, tuple({"round": t, "accuracy": t / 10} for t in range(rounds)))

    group = Group("x", (data(5), data(2, diverged=True), data(5)))
    at, values = group.bands("accuracy")
    assert (at, values.shape) == ([0, 1, 2, 3, 4], (2, 5))
    assert group.accuracies == (0.4, 0.0, 0.4), "a diverged run still counts"


def test_epsilon_is_drawn_for_both_views_with_the_budget(report: Report, runs: list[Path]) -> None:
    planned = read_recorded_spending(runs[0]).planned
    drawn = figure(report, "epsilon")
    server, third, spent = drawn["data"]
    assert server["y"] == [0.0, *(plotted_loss(planned.server(t)) for t in (1, 2, 3))]
    assert third["y"] == [0.0, *(plotted_loss(planned.third_party_after(t)) for t in (1, 2, 3))]
    assert spent["y"] == [plotted_loss(row["epsilon_server_max"]) for row in lines_of(runs[0])]
    assert drawn["layout"]["yaxis"]["hoverformat"] == ".5~r"
    assert drawn["layout"]["marks"] == [{"value": 9.0, "text": "budget 9"}]


def test_every_figure_has_labels_a_caption_and_numbers(report: Report) -> None:
    want = {
        "accuracy",
        "loss",
        "epsilon",
        "tradeoff",
        "clients",
        "labels",
        "traffic",
        "volume",
        "spread",
        "drift",
    }
    assert {f.id for f in report.figures} == want | {"sqrt-v", "abs-m"}
    for f in report.figures:
        assert f.x["title"]["text"]
        assert f.rows
        assert all(len(row) == len(f.head) for row in f.rows)
        assert len(f.caption) > 20
        assert len(f.traces) == 1 or all("series" in t["meta"] for t in f.traces)
    marks = [
        attrs for tag, attrs in Tags(body(report)).found if tag == "div" and "data-figure" in attrs
    ]
    assert all(m["role"] == "img" and len(m["aria-label"] or "") > 40 for m in marks)
    assert len(marks) == len(report.figures)


def test_the_label_map_shows_the_recorded_counts(report: Report, runs: list[Path]) -> None:
    held = json.loads((runs[0] / "holdings.json").read_text())
    assert figure(report, "labels")["data"][0]["z"] == held["labels"]
    assert "private" in held["release"]


def test_the_epsilon_of_each_client_is_the_ledgers(report: Report, runs: list[Path]) -> None:
    rows = [row for row in figure(report, "clients")["rows"] if row[0] == "dp-fedadamw"]
    assert [row[2] for row in rows] == [
        plotted_loss(each) for each in read_recorded_spending(runs[0]).epsilons
    ]


def test_the_best_on_equal_terms_is_bold(report: Report) -> None:
    best = max(report.groups, key=lambda g: np.mean(g.accuracies)).label
    assert re.findall(r"<td><strong>([a-z-]+)</strong>", body(report)) == [best]
    assert "the best on equal terms is in bold" in body(report)


def test_a_single_run_has_accuracy_and_epsilon_on_top(runs: list[Path]) -> None:
    alone = read_report([runs[0]])
    assert [card.name for card in cards(alone.groups)][:2] == ["Accuracy", "Epsilon, server"]
    assert "Nothing has been scored yet" not in render(alone)


# ---- the public page


def test_a_public_page_has_no_value_of_a_single_client(public: Report, runs: list[Path]) -> None:
    assert {f.id for f in public.figures} == {
        "accuracy",
        "loss",
        "epsilon",
        "tradeoff",
        "traffic",
        "volume",
    }
    text = body(public) + json_block([f.plain() for f in public.figures])
    for word in [
        *SEEDS,
        "987654321",
        "spent most so far",
        'cohort"',
        'eligible"',
        str(runs[0].parent),
        "holdings",
    ]:
        assert word not in text
    most = {row["epsilon_server_max"] for path in runs for row in lines_of(path)}
    planned = read_recorded_spending(runs[0]).planned
    realised = most - {planned.server(t) for t in (1, 2, 3)} - {0.0}
    shown = {
        word
        for value in realised
        for word in (show_loss(value), str(plotted_loss(value)), str(value))
    }
    assert not [word for word in shown if word in text]
    assert all(not g.privacy.epsilons for g in public.groups if g.privacy)


def test_a_public_page_lists_the_values_it_leaves_out(public: Report, report: Report) -> None:
    assert "who takes part in which round" in body(public)
    assert "not for release" in body(public), "the noise was seeded"
    assert "For the operator only" in body(report)
    assert "For the operator only" not in body(public)


def test_unknown_fields_do_not_reach_a_public_page(runs: list[Path], tmp_path: Path) -> None:
    run = shutil.copytree(runs[0], tmp_path / "run")
    result = json.loads((run / "run.json").read_text())
    result |= {"clients_spent": "SECRET", "stopped": "SECRET", "out": "SECRET"}
    (run / "run.json").write_text(json.dumps(result))
    rows = [json.dumps({**row, "who": "SECRET"}) for row in lines_of(run)]
    (run / "metrics.jsonl").write_text("\n".join(rows))
    assert "SECRET" not in render(read_report([run], public=True))


# ---- escaping


def hostile(run: Path, folder: Path) -> Path:
    bad = shutil.copytree(run, folder / "bad")
    config = (bad / "config.toml").read_text()
    config = re.sub(r'name = "(digits|linear|dp-[a-z]+)"', f"name = {json.dumps(HOSTILE)}", config)
    (bad / "config.toml").write_text(
        config.replace('clip_mode = "flat"', f"clip_mode = {json.dumps(HOSTILE)}")
    )
    result = json.loads((bad / "run.json").read_text())
    result |= {"versions": {HOSTILE: HOSTILE}, "python": HOSTILE, "state": HOSTILE}
    (bad / "run.json").write_text(json.dumps(result))
    held = json.loads((bad / "holdings.json").read_text())
    held["classes"] = [f"{i}{HOSTILE}" for i in range(10)]
    (bad / "holdings.json").write_text(json.dumps(held))
    return bad


@pytest.mark.parametrize("public", [False, True])
def test_a_hostile_name_is_only_text(runs: list[Path], tmp_path: Path, public: bool) -> None:
    html = render(read_report([hostile(runs[0], tmp_path), runs[2]], public=public))
    tags = Tags(html).found
    scripts = [attrs.get("id") for tag, attrs in tags if tag == "script"]
    assert scripts == ["figures", "library", None]
    assert not [tag for tag, _ in tags if tag == "img"]
    assert not [attrs for _, attrs in tags if any(name.startswith("on") for name in attrs)]
    data = html.split('id="figures">', 1)[1].split("</script>", 1)[0]
    assert "<" not in data
    figures = json.loads(data)
    names = [t.get("name", "") for f in figures.values() for t in f["data"]]
    assert any("&lt;img" in name for name in names), "plotly would read HTML in names"
    assert not any("<img" in name for name in names)
    assert any(HOSTILE in str(cell) for f in figures.values() for row in f["rows"] for cell in row)


def test_the_page_runs_its_own_scripts_and_fetches_nothing(report: Report) -> None:
    tags = Tags(render(report)).found
    policy = next(
        a["content"] or "" for tag, a in tags if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert "unsafe-eval" not in policy
    assert "unsafe-inline" not in policy.split("style-src")[0]
    places = [a.get("src") or a.get("href") or "" for tag, a in tags]
    assert not [place for place in places if place and not place.startswith(("#", "data:"))]
    assert "connect-src &#39;self&#39;" in render(report, "v1")


# ---- labels, rounds, damaged folders


def test_labels_name_the_settings_that_differ() -> None:
    one = {"algorithm.name": "a", "algorithm.lr": 0.1, "run.seed": 1, "data.alpha": 0.5}
    assert labels([one, {**one, "algorithm.lr": 0.2}]) == ["a, lr 0.1", "a, lr 0.2"]
    assert labels([one, {**one, "algorithm.name": "b", "algorithm.lr": 3}]) == ["a", "b"]
    assert labels([one, {**one, "data.alpha": 0.1}]) == ["a, alpha 0.5", "a, alpha 0.1"]
    assert labels([one, {**one, "data.name": "x"}]) == ["a", "a, data x"]
    close = {**one, "algorithm.lr": 0.12345678}
    assert labels([close, {**close, "algorithm.lr": 0.12345679}]) == [
        "a, lr 0.12345678",
        "a, lr 0.12345679",
    ]
    paths = [{**one, "model.weights": f"/{'long/' * 30}{name}"} for name in ("x", "y")]
    assert [label[-6:] for label in labels(paths)] == ["long/x", "long/y"]


def test_hidden_settings_are_numbered_in_labels() -> None:
    one = {"algorithm.name": "a", "algorithm.lr": 0.1}
    whole = [{**one, "data.path": path} for path in ("/home/b", "/home/c", "/home/b")]
    whole[2]["data.alpha"] = 1.0
    shown = [one, one, {**one, "data.alpha": 1.0}]
    assert labels(shown, whole) == ["a, path no. 1", "a, path no. 2", "a, alpha 1"]


def test_a_label_has_at_most_a_few_settings() -> None:
    one = {"algorithm.name": "a", **{f"data.key{i}": 0 for i in range(9)}}
    other = {"algorithm.name": "a", **{f"data.key{i}": 1 for i in range(9)}}
    assert labels([one, other])[0] == "a, key0 0, key1 0, key2 0, key3 0, 5 more settings"


def test_equal_labels_of_several_folders_become_different() -> None:
    one = {"algorithm.name": "a", "algorithm.lr": 0.1}
    other = {**one, "algorithm.lr": 2.9, "run.seed": 5}
    places = ["given by itself", "in s1", "in s2"]
    three = [one, other, other]
    assert apart(["a", "a", "a"], three, three, places) == [
        "a, lr 0.1",
        "a, lr 2.9, in s1",
        "a, lr 2.9, in s2",
    ]
    assert apart(["a", "b"], [one, other], [one, other], places[:2]) == ["a", "b"]
    assert apart(["a", "a"], [one, one], [one, one]) == ["a, no. 1", "a, no. 2"]


def test_epsilon_is_computed_most_often_in_early_rounds() -> None:
    assert rounds_shown(1) == (1,)
    assert rounds_shown(3) == (1, 2, 3)
    some = rounds_shown(1000)
    assert (some[0], some[-1]) == (1, 1000)
    assert len(some) <= 18
    assert sum(t <= 10 for t in some) >= 4
    assert max(b - a for a, b in itertools.pairwise(some)) <= 170


def test_a_damaged_run_is_still_shown(runs: list[Path], tmp_path: Path) -> None:
    run = shutil.copytree(runs[0], tmp_path / "run")
    (run / "run.json").write_text("{")
    (run / "holdings.json").write_text('{"classes": ["a"], "labels": [[1, 2]]}')
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text(f'{lines[0]}\n{lines[1]}\n{{"round": 2, "accu')
    shown = read_report([run])
    assert figure(shown, "accuracy")["data"][0]["x"] == [0, 1]
    assert "does not name the run" in body(shown)
    assert "labels" not in {f.id for f in shown.figures}


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DpfedError, match="neither the folder of a run nor of a study"):
        read_report([tmp_path])


def test_a_run_without_privacy_says_so(runs: list[Path], tmp_path: Path) -> None:
    run = shutil.copytree(runs[2], tmp_path / "run")
    result = json.loads((run / "run.json").read_text())
    none = {"server_worst": None, "server_max": None, "third_party": None}
    (run / "run.json").write_text(
        json.dumps({**result, "release": "no privacy", "epsilon": none, "delta": None})
    )
    shown = read_report([run])
    assert "No privacy" in body(shown)
    assert {"epsilon", "tradeoff", "clients"}.isdisjoint(f.id for f in shown.figures)
    assert grouped([run], False)[0].epsilon == {"server_worst": None, "third_party": None}


def test_only_the_pages_own_files_are_marked_safe() -> None:
    templates = Path(page.__file__).parent / "templates"
    text = "".join(path.read_text() for path in templates.glob("*.html.j2"))
    assert set(re.findall(r"\{\{ (\w+) \| safe \}\}", text)) == {"figures", "script", "style"}
    assert text.count("safe }}") == 3
    assert "autoescape" not in text
    assert page.TEMPLATES.autoescape is True


def test_a_study_needs_its_reader(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text("{}")
    with pytest.raises(DpfedError, match="folder of a study"):
        read_report([tmp_path])
