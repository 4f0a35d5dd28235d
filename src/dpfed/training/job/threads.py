"""How many CPU threads torch computes with, which is one number for the whole process."""

from __future__ import annotations

import torch

SMALL = (
    1_000_000  # models with fewer parameters are computed by one CPU thread unless told otherwise
)
_usual: list[int] = []  # threads of this process before a small model was given one


def set_threads(threads: int | str, parameters: int) -> None:
    """Handing work to another thread costs more than it brings while a layer takes microseconds.

    `auto` gives a large model that comes after a small one as many threads as there were before.
    """
    now = torch.get_num_threads()
    if threads != "auto":
        torch.set_num_threads(int(threads))
    elif parameters < SMALL:
        _usual[:] = [now] if now > 1 else _usual
        torch.set_num_threads(1)
    elif now == 1 and _usual:
        torch.set_num_threads(_usual[0])
