"""The score by which a table compares methods: accuracy, or R2 for predicted numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpfed.privacy.published import show_percent, show_score

DASH = "–"


@dataclass(frozen=True)
class Measure:
    """A score of which a larger value is better.

    key     name of the score in files
    name    name of the score in tables and figures
    values  name in `table.json` of the list with one score for each seed
    unit    of the shown scores; "" if they have none
    scale   factor from a stored score to a shown score
    lowest  smallest possible shown score
    """

    key: str
    name: str
    values: str
    unit: str
    scale: float
    lowest: float

    @property
    def title(self) -> str:
        """The name at the beginning of a line, such as "Accuracy"."""
        return self.name[:1].upper() + self.name[1:]

    def label(self, where: str = "") -> str:
        """Return the name for the axis of a plot: "accuracy on the test half, %"."""
        words = f"{self.name} {where}".strip()
        return f"{words}, {self.unit}" if self.unit else words

    def shown(self, mean: float | None, spread: float | None, sign: bool = False) -> str:
        """Return a mean, or a difference with its sign, as text: "91.20 ± 0.45"."""
        if mean is None:
            return DASH
        if self.unit == "%":
            text = show_percent(mean, 2, sign)
            return text if spread is None else f"{text} ± {show_percent(spread, 2)}"
        plus = "+" if sign and mean >= 0 else ""
        text = plus + show_score(mean)
        return text if spread is None else f"{text} ± {show_score(spread)}"


ACCURACY = Measure("accuracy", "accuracy", "accuracies", "%", 100.0, 0.0)
R2 = Measure("r2", "R2", "r2_values", "", 1.0, -math.inf)
MEASURES = {measure.key: measure for measure in (ACCURACY, R2)}
# Further scores of a task, in the order of their columns.
OTHER_SCORES = {
    "multilabel": ("macro_f1", "exact_match"),
    "regress": ("mae", "rmse"),
    "causal": ("perplexity",),
}


def measure_of(task: str) -> Measure:
    """Return the score by which methods of a task are compared."""
    return R2 if task == "regress" else ACCURACY
