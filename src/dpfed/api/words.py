"""Error messages that name Python keywords instead of configuration keys; checks of arguments."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpfed.config import nearest
from dpfed.errors import DpfedError, python_phrases
from dpfed.training.callbacks.base import Callback

# Keywords of `fine_tune`, and the configuration keys that they set.
KEYS = {
    "clients": "data.clients",
    "delta": "privacy.delta",
    "epsilon": "privacy.target_epsilon",
    "rounds": "run.rounds",
    "trainable": "model.train",
    "task": "model.task",
    "metric": "run.metric",
    "early_stopping": "run.early_stopping",
    "keep": "run.keep",
    "class_weights": "model.class_weights",
    "algorithm": "algorithm.name",
}
# Keywords that users of other libraries may try, each with the keyword of `fine_tune` to use
# instead.
ELSEWHERE = {
    "batch_size": 'settings={"privacy.batch": 16}',
    "device": 'settings={"run.device": "cpu"}',
    "epochs": "rounds",
    "learning_rate": "lr",
    "max_epochs": "rounds",
    "max_grad_norm": 'settings={"privacy.clip": 1.0}',
    "noise_multiplier": 'settings={"privacy.sigma": 1.0}',
    "num_train_epochs": "rounds",
    "optimizer": "algorithm",
    "output_dir": "out",
    "per_device_train_batch_size": 'settings={"privacy.batch": 16}',
    "random_state": 'settings={"run.seed": 0}',
    "seed": 'settings={"run.seed": 0}',
    "target_delta": "delta",
    "target_epsilon": "epsilon",
}


@contextmanager
def python_words(options: Mapping[str, Any] | None = None, model: Any = None) -> Iterator[None]:
    """Within this context, errors name Python keywords, not configuration keys or CLI options.

    options  keywords of the Python call, such as `fine_tune(...)`
    model    the argument `model` of that call
    """
    with python_phrases():
        try:
            yield
        except DpfedError as error:
            error.args = (in_keywords(str(error), options or {}, model), *error.args[1:])
            raise


def in_python(sentences: Sequence[str]) -> tuple[str, ...]:
    """Return these sentences about a run with Python keywords in place of configuration keys."""
    return tuple(in_keywords(sentence, {}, None) for sentence in sentences)


def in_keywords(sentence: str, options: Mapping[str, Any], model: Any) -> str:
    """Return a sentence with Python keywords in place of configuration keys.

    Keys without a keyword stay, and so do keys that the user has written in `settings`.

    options, model  the keywords and the argument `model` of the Python call
    """
    settings = options.get("settings")
    named = set(settings) if isinstance(settings, Mapping) else set()
    words = {key: keyword for keyword, key in KEYS.items()}
    if isinstance(model, str | Path):
        words["model.weights"] = "model"

    def word(match: re.Match[str]) -> str:
        key = match[0]
        if key in named:
            return key
        return words.get(key, key.removeprefix("algorithm."))

    keys = "|".join(map(re.escape, words))
    # Replace only keys in plain words. Leave keys in quotes (entries of `settings`), after a colon
    # (as in "dp-fedavg:lr=1") or after a slash (file names).
    sentence = re.sub(
        rf"(?<![\w./:;'\"\[])(?:{keys}|algorithm\.\w+)(?![\w'\"\]]|\.\w)", word, sentence
    )
    return re.sub(r"= (true|false)\b", lambda match: f"= {match[1].capitalize()}", sentence)


def refuse_unknown(call: str, names: Iterable[str], known: Sequence[str]) -> None:
    """Raise DpfedError for the first of `names` that is no keyword of the function `call`."""
    for name in names:
        if name not in known:
            remedy = f": give {ELSEWHERE[name]}" if name in ELSEWHERE else nearest(name, known)
            raise DpfedError(f"{name} is no keyword of {call}{remedy}")


def refuse_arguments(
    out: Any, callbacks: Any = (), progress: Any = True, resume: Any = False
) -> None:
    """Raise DpfedError for an argument of a wrong type, and for `resume` without `out`."""
    if out is not None and not isinstance(out, str | os.PathLike):
        raise DpfedError(f"out must be the path of a folder, not {type(out).__name__}")
    for name, value in {"resume": resume, "progress": progress}.items():
        if not isinstance(value, bool):
            raise DpfedError(f"{name} = {value!r:.60} must be True or False")
    if resume and out is None:
        raise DpfedError("resume = True needs out, the folder of the run that goes on")
    if not isinstance(callbacks, Sequence):
        raise DpfedError(f"callbacks must be a list of callbacks, not {type(callbacks).__name__}")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise DpfedError(
                "callbacks must be objects of subclasses of dpfed.Callback, "
                f"not {getattr(callback, '__name__', type(callback).__name__)}"
            )
