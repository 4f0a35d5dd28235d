"""The score by which a table compares methods: accuracy, or R2 for predicted numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpfed.privacy.published import show_percent, show_score

DASH = "–"


@dataclass(frozen=True)
class Measure:
    """A kind of score by which methods are compared, such as accuracy; larger values are better.

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
        """The score's name with a capital letter, for the beginning of a line: "Accuracy"."""
        return self.name[:1].upper() + self.name[1:]

    def label(self, where: str = "") -> str:
        """Return the label for the axis of a plot: "accuracy on the test half, %"."""
        words = f"{self.name} {where}".strip()
        return f"{words}, {self.unit}" if self.unit else words

    def shown(self, mean: float | None, spread: float | None, sign: bool = False) -> str:
        """Return a mean score as text, with its spread if it is known: "91.20 ± 0.45".

        sign  True for a difference of scores, which is shown with + or -
        """
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
# Further scores of each task, in the order of their columns in a table.
OTHER_SCORES = {
    "multilabel": ("macro_f1", "exact_match"),
    "regress": ("mae", "rmse"),
    "causal": ("perplexity",),
}


def measure_of(task: str) -> Measure:
    """Return the kind of score by which methods of a task are compared: R2 or accuracy."""
    return R2 if task == "regress" else ACCURACY
