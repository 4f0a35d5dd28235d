"""Write the pages of results from results/*.csv.

docs/results.md gets a short table at each of its markers. docs/results/ gets one page for each
study, with its whole table, its command and its runs, and a page that lists the studies.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from results_language import is_language, language_cells
from results_specs import Spec, named
from results_studies import (
    COLUMNS,
    EPSILONS,
    RATES,
    Cells,
    Rows,
    collect,
    read_csv,
    with_statistics,
)

from dpfed.errors import DpfedError
from dpfed.privacy.published import show_loss, show_perplexity
from dpfed.report.measures import ACCURACY
from dpfed.report.tables import EQUAL_EPSILON_FACTOR, Row, Table, best_of, grid_words, size

PHASES = {"reported": "reported", "tuning": "of the search"}
EMPTY = "Not measured yet."

# ------------------------------------------------------------------ CSV to the page


def section(spec: Spec, tables: Mapping[str, Rows]) -> str:
    """Return the text of a study's page: question, findings, tables, notes and command."""
    mine = {
        name: [row for row in rows if row["study"] == spec.name] for name, rows in tables.items()
    }
    if not mine["studies"] or not mine["runs"]:
        return f"{spec.question} {EMPTY}"
    about = mine["studies"][0]
    arms = mine["arms"]
    parts = [about["question"]]
    if about["missing"] != "0":
        least = "at least " if about["searching"] else ""
        parts.append(
            f"**Incomplete:** {about['done']} runs are done, {least}{about['missing']} are missing."
        )
    if not any(run["phase"] == "reported" for run in mine["runs"]):
        return "\n\n".join(parts)
    if spec.findings:
        parts.append("\n".join(f"- {sentence}" for sentence in spec.findings))
    if spec.plot and mine["curves"]:
        alt = f"Accuracy over rounds: {about['title']}"
        parts.append(
            "\n".join(
                f"![{alt}](../images/results-{spec.name}-{t}.svg){{ .{t}-only }}"
                for t in ("light", "dark")
            )
        )
    if about["axis"] and any(arm["mean"] for arm in arms):
        laid_out = grid_words(as_table(about, arms, mine["runs"]), lambda text: f"**{text}**")
        assert laid_out is not None
        parts.append(pipes(*laid_out))
    parts.append(pipes(*arm_cells(about, arms, mine["runs"])))
    parts.append("\n".join(f"- {line}" for line in notes(about, arms, mine["runs"])))
    parts.append(f"<!-- runs: experiments/results.py -->\n```sh\n{about['command']}\n```")
    return "\n\n".join(parts)


def as_table(about: Cells, arms: Rows, runs: Rows) -> Table:
    """Return the arms as a table of `dpfed compare`, for its layout and its choice of the best."""
    rows = []
    for arm in arms:
        mine = [
            float(r["accuracy"])
            for r in runs
            if r["arm"] == arm["arm"] and r["phase"] == "reported"
        ]
        epsilon = {
            view: float(text) if (text := arm[f"epsilon_{view}"]) else None for view in EPSILONS
        }
        rows.append(
            Row(
                arm["arm"],
                arm["row"],
                arm["column"],
                at_edge=arm["inside_grid"] == "no",
                scores=tuple(mine),
                diverged=int(arm["diverged"] or 0),
                epsilon=epsilon,
                failed=arm["failed"] or None,
            )
        )
    return Table(about["title"], about["axis"], tuple(rows))


def costly(arms: Rows) -> set[str]:
    """Return the arms that spend more than the cheapest private one of their column."""
    out: set[str] = set()
    for column in {arm["column"] for arm in arms}:
        spent = {
            a["arm"]: float(e)
            for a in arms
            if a["column"] == column and (e := a["epsilon_server_worst"])
        }
        out |= {
            label
            for label, value in spent.items()
            if value > EQUAL_EPSILON_FACTOR * min(spent.values())
        }
    return out


def arm_cells(about: Cells, arms: Rows, runs: Rows) -> tuple[list[str], list[list[str]]]:
    head = [
        "method",
        "rate",
        "inside the grid",
        "accuracy %",
        "seeds",
        "difference [95 % interval]",
        "ε server",
        "ε third party",
        "up",
    ]
    if is_language(runs):
        return language_cells(arms, runs)
    unequal = costly(arms)
    best = set() if about["axis"] else best_of(as_table(about, arms, runs).rows, unequal)
    body = []
    for arm in arms:
        marks = [mark for mark, on in flags(arm, unequal).items() if on]
        accuracy = ACCURACY.shown(
            float(arm["mean"]) if arm["mean"] else None, float(arm["std"]) if arm["std"] else None
        )
        private = [
            show_loss(float(e), 2) if (e := arm[f"epsilon_{view}"]) else "–" for view in EPSILONS
        ]
        bold = "**" if arm["arm"] in best else ""
        body.append(
            [
                f"{bold}{named(arm['arm'])}{bold}" + "".join(f" {mark}" for mark in marks),
                " ".join(f"{key} {float(arm[key]):g}" for key in RATES if arm[key]) or "–",
                arm["inside_grid"] or "–",
                f"{bold}{accuracy}{bold}",
                arm["n"] or "0",
                _difference(arm),
                *(private if private[0] != "–" or not arm["mean"] else ["no privacy"] * 2),
                size(int(arm["up_bytes"])) if arm["up_bytes"] else "–",
            ]
        )
    return head, body


def _difference(arm: Cells) -> str:
    if not arm["difference"]:
        return "reference" if arm["arm"] == arm["reference"] else "–"
    text = f"{100 * float(arm['difference']):+.2f}"
    if not arm["interval_low"]:
        return text
    low, high = (100 * float(arm[key]) for key in ("interval_low", "interval_high"))
    return f"{text} [{low:+.2f}, {high:+.2f}]"


def flags(arm: Cells, unequal: set[str]) -> dict[str, bool]:
    return {
        "†": arm["arm"] in unequal,
        "¶": arm["inside_grid"] == "no",
        "‡": int(arm["diverged"] or 0) > 0,
        "§": bool(arm["failed"]),
    }


def notes(about: Cells, arms: Rows, runs: Rows) -> list[str]:
    unequal = costly(arms)
    said = {
        "†": "spends a larger ε than others at the same noise, "
        "so it is not on equal terms and never in bold",
        "¶": "the best rate is at the edge of what was tried, "
        "or none was better than one answer for all",
        "‡": "has runs that diverged, which count as accuracy 0",
        "§": "could not be run: "
        + "; ".join(f"{arm['arm']}: {arm['failed']}" for arm in arms if arm["failed"]),
    }
    out = [
        f"{mark} {text}"
        for mark, text in said.items()
        if any(flags(arm, unequal)[mark] for arm in arms)
    ]
    grids: dict[str, list[str]] = {}
    for arm in arms:
        if arm["grid"]:
            grids.setdefault(arm["grid"], []).append(arm["arm"])
    if grids:
        counts = sorted({arm["tuning_runs"] for arm in arms if arm["grid"]}, key=int)
        runs_each = " to ".join(dict.fromkeys((counts[0], counts[-1])))
        begun = [f"{grid} ({', '.join(map(named, names))})" for grid, names in grids.items()]
        out.append(f"Searches of {runs_each} runs for each arm, begun with {'; '.join(begun)}")
    seeds = {
        phase: sorted({int(row["seed"]) for row in runs if row["phase"] == phase})
        for phase in PHASES
    }
    said_of = [
        f"{word} {', '.join(map(str, seeds[phase]))}"
        for phase, word in PHASES.items()
        if seeds[phase]
    ]
    out += [f"Seeds: {'; '.join(said_of)}"] if said_of else []
    where = f" on {about['machine']}" if about["machine"] else ""
    out.append(
        "; ".join(part for part in (f"{about['done']} runs{where}", about["versions"]) if part)
    )
    return out


def pipes(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(
        "| " + " | ".join(word.replace("|", "\\|") for word in line) + " |" for line in lines
    )


GENERATED = "<!-- made by `python experiments/results.py page`; change nothing here -->"
RUN_COLUMNS = {"arm": "method", "phase": "use", "seed": "seed", **{key: key for key in RATES}}


def study_page(spec: Spec, tables: Mapping[str, Rows]) -> str:
    """Return the appendix page of one study."""
    parts = [GENERATED, f"# {spec.title}", section(spec, tables)]
    runs = [row for row in tables["runs"] if row["study"] == spec.name]
    if runs:
        parts += ["## Runs", pipes(*run_cells(runs))]
    return "\n\n".join(parts) + "\n"


def run_cells(runs: Rows) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table with one row for each run of a study."""
    used = [key for key in RUN_COLUMNS if any(run[key] for run in runs)]
    language = is_language(runs)
    head = [*(RUN_COLUMNS[key] for key in used), "perplexity" if language else "accuracy %"]
    head.append("ε server")
    body = []
    for run in runs:
        cells = [named(run[key]) if key == "arm" else run[key] for key in used]
        epsilon = run["epsilon_server_worst"]
        spent = show_loss(float(epsilon), 2) if epsilon else "no privacy"
        score = ACCURACY.shown(float(run["accuracy"]), None)
        if language:
            score = show_perplexity(float(run["perplexity"]) if run["perplexity"] else None)
        body.append([*cells, score, spent])
    return head, body


HOW_TO_READ = """\
- Accuracy is the mean ± the standard deviation over seeds, on one half of the public test data.
- Learning rates are chosen on the other half. Each method has another seed and the same number of
  runs for that.
- A difference is paired by seed, with Student's 95 % interval. If the interval contains 0, the
  methods do not differ significantly.
- Intervals do not include the choice of the learning rate. Two searches of DP-LocalAdamW differ by
  1.3 points.
- ε holds at δ = 1e-5 for a client in every round, as the server sees it. It does not include
  tuning.
- "Up" is the number of bytes that one client sends in a round.
- Machines, versions and learning rates are on each study's page."""


def index_page(specs: Sequence[Spec], tables: Mapping[str, Rows]) -> str:
    """Return the page that lists all studies."""
    done = {row["study"]: row["done"] for row in tables["studies"]}
    body = [
        [f"[{spec.title}]({spec.name}.md)", done.get(spec.name, "not measured"), spec.question]
        for spec in specs
    ]
    intro = (
        "Each page has the whole table of a study, the command that makes it, and its runs. "
        "[Results](../results.md) has the findings."
    )
    table = pipes(["study", "runs", "question"], body)
    parts = [GENERATED, "# All studies", intro, table, "## How to read the tables", HOW_TO_READ]
    return "\n\n".join(parts) + "\n"


def short_table(spec: Spec, tables: Mapping[str, Rows]) -> str:
    """Return the table of a study for the page of findings, with the command that makes it."""
    about = next((row for row in tables["studies"] if row["study"] == spec.name), None)
    arms = [row for row in tables["arms"] if row["study"] == spec.name]
    if about is None or not any(arm["mean"] for arm in arms):
        return EMPTY
    head, body = arm_cells(about, arms, [r for r in tables["runs"] if r["study"] == spec.name])
    kept = [head.index(name) for name in SHORT_COLUMNS if name in head]
    table = pipes([head[i] for i in kept], [[row[i] for i in kept] for row in body])
    command = f"python experiments/results.py run --only {spec.name} --out DIR"
    run = f"<!-- runs: experiments/results.py -->\n```sh\n{command}\n```"
    return "\n\n".join([table, run, f"[Whole table and all runs](results/{spec.name}.md)"])


SHORT_COLUMNS = (
    *("method", "accuracy %", "difference [95 % interval]"),
    *("before", "perplexity", "exact match %", "ε server", "up"),
)
MARKED = re.compile(
    r"^<!-- results: (?P<name>[\w-]+) -->\n(?P<body>.*?)^<!-- end -->$", re.M | re.S
)


def filled(text: str, specs: Sequence[Spec], tables: Mapping[str, Rows]) -> str:
    """Return the page of findings with the current table at each marker."""
    known = {spec.name: spec for spec in specs}
    strange = sorted({name for m in MARKED.finditer(text) if (name := m["name"]) not in known})
    if strange:
        raise DpfedError(f"the page has markers of unknown studies: {', '.join(strange)}")

    def part(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- results: {name} -->\n{short_table(known[name], tables)}\n<!-- end -->"

    return MARKED.sub(part, text)


def pages(docs: Path, specs: Sequence[Spec], tables: Mapping[str, Rows]) -> dict[Path, str]:
    """Return the text of every page of results by its path; `docs` is the page of findings."""
    appendix = docs.with_suffix("")
    return {
        docs: filled(docs.read_text(encoding="utf-8"), specs, tables),
        appendix / "index.md": index_page(specs, tables),
        **{appendix / f"{spec.name}.md": study_page(spec, tables) for spec in specs},
    }


def page(out: Path | None, folder: Path, docs: Path, specs: Sequence[Spec], check: bool) -> int:
    """Write the CSV files and the pages, or compare the pages with the CSV files."""
    if out is not None:
        if check:
            raise DpfedError("--check compares the pages with the CSV files: leave out the folder")
        collect(out, folder, specs)
    tables = {name: read_csv(folder, name) for name in COLUMNS}
    # Refuse means that do not follow from the runs.
    for spec in specs:
        arms = [dict(row) for row in tables["arms"] if row["study"] == spec.name]
        again = [dict(row) for row in arms]
        with_statistics(again, [row for row in tables["runs"] if row["study"] == spec.name])
        if arms != again:
            raise DpfedError(f"{folder / 'arms.csv'}: {spec.name} is not what runs.csv gives")
    wanted = pages(docs, specs, tables)
    if check:
        stale = [path for path, text in wanted.items() if _read(path) != text]
        for path in stale:
            print(
                f"{path} is not what the CSV files give: python experiments/results.py page",
                file=sys.stderr,
            )
        return int(bool(stale))
    for path, text in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    draw([spec for spec in specs if spec.plot], tables, docs.parent / "images")
    return 0


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


# ------------------------------------------------------------------ pictures

# Colours of Okabe and Ito (2008), lighter on dark pages; the reference has the first.
LINES = {
    "light": ("#0072B2", "#B85A00", "#00785A", "#A3427E", "#6B5B00", "#1f2328", "#3E8DB5"),
    "dark": ("#56B4E9", "#E69F00", "#33C79A", "#E39BC4", "#F0E442", "#f0f6fc", "#8FC9EE"),
}
STYLES = ("-", "--", "-.", ":")


def draw(specs: Sequence[Spec], tables: Mapping[str, Rows], images: Path) -> None:
    for spec in specs:
        curves: dict[str, dict[str, dict[int, float]]] = {}
        for row in tables["curves"]:
            if row["study"] == spec.name:
                seeds = curves.setdefault(row["arm"], {})
                seeds.setdefault(row["seed"], {})[int(row["round"])] = float(row["accuracy"])
        arms = [arm for arm in tables["arms"] if arm["study"] == spec.name and arm["arm"] in curves]
        if arms:
            for theme in LINES:
                picture(
                    spec.title, arms, curves, theme, images / f"results-{spec.name}-{theme}.svg"
                )


def picture(
    title: str,
    arms: Rows,
    curves: Mapping[str, Mapping[str, Mapping[int, float]]],
    theme: str,
    path: Path,
) -> None:
    """Draw the reference and the best other arms, as many as there are colours."""
    import make_pictures as style
    from matplotlib import pyplot

    ranked = sorted(arms, key=lambda arm: (arm["arm"] != arm["reference"], -float(arm["mean"])))
    shown = ranked[: len(LINES[theme])]
    path.parent.mkdir(parents=True, exist_ok=True)
    with pyplot.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "dpfed", "font.family": "sans-serif"}
    ):
        figure, axes, colours = style.begin(theme, (7.2, 5.0))
        for i, arm in enumerate(shown):
            lines = curves[arm["arm"]].values()
            rounds = sorted(set.intersection(*(set(line) for line in lines)))
            values = [[100 * line[t] for line in lines] for t in rounds]
            colour = LINES[theme][i]
            low = [min(v) for v in values]
            high = [max(v) for v in values]
            axes.fill_between(rounds, low, high, color=colour, alpha=0.18, linewidth=0)
            means = [sum(v) / len(v) for v in values]
            axes.plot(
                rounds,
                means,
                STYLES[i % len(STYLES)],
                color=colour,
                linewidth=2.4 if i == 0 else 1.8,
                label=arm["arm"],
            )
        axes.set_xlabel("round")
        axes.set_ylabel("accuracy on the test half, %")
        # Below the axes, since curves may be anywhere inside.
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(0, -0.14),
            ncols=2,
            frameon=False,
            labelcolor=colours["ink"],
            fontsize=9,
        )
        few = f"{len(shown)} best of {len(arms)} arms · " if len(shown) < len(arms) else ""
        style.titled(axes, colours, title, f"{few}mean and range of the seeds")
        style.finish(figure, axes, colours, path)
