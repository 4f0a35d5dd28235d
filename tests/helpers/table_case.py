"""Three rows of a comparison, for tests of tables."""

from __future__ import annotations

from dpfed.report.tables import Row, Table, paired

OURS = (0.90, 0.92, 0.94)
THEIRS = (0.89, 0.93, 0.90)
EPS = {"server_worst": 2.0, "third_party": 1.0}
TRAFFIC = {
    "up_numbers": 1000,
    "up_bytes": 4000,
    "down_numbers": 2_500_000,
    "down_bytes": 10_000_000,
}


def three_rows() -> Table:
    """Return two rows on equal terms and one with a larger epsilon and accuracy."""
    rows = (
        Row(
            "dp-fedavg",
            rates={"lr": 0.1},
            tuning_runs=6,
            scores=THEIRS,
            difference=paired(THEIRS, OURS),
            epsilon=EPS,
        ),
        Row(
            "dp-fedsam",
            tuning_runs=6,
            scores=(0.99, 0.99, 0.99),
            epsilon={"server_worst": 4.5, "third_party": 2},
        ),
        Row(
            "dp-fedadamw",
            rates={"lr": 0.01},
            tuning_runs=6,
            scores=OURS,
            epsilon=EPS,
            traffic=TRAFFIC,
        ),
    )
    return Table("t", "", rows, "dp-fedadamw", ("n",))
