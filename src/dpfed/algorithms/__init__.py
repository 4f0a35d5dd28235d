"""Registry of the federated algorithms by name. Each algorithm has its own file.

To add an algorithm, implement the interface of `base.py` in a file here, and add a line to `_ALL`
and a test.
"""

from __future__ import annotations

from dpfed.algorithms.base import Algorithm
from dpfed.algorithms.dp_adambc import DPAdamBC
from dpfed.algorithms.dp_fafed import DPFAFED
from dpfed.algorithms.dp_fedadamw import DPFedAdamW
from dpfed.algorithms.dp_fedadamw_printed import DPFedAdamWPrinted
from dpfed.algorithms.dp_fedavg import DPFedAvg
from dpfed.algorithms.dp_fedavg_ls import DPFedAvgLS
from dpfed.algorithms.dp_fedlada import DPFedLADA
from dpfed.algorithms.dp_fedopt import DPFedOpt
from dpfed.algorithms.dp_fedsam import DPFedSAM
from dpfed.algorithms.dp_local_adamw import DPLocalAdamW
from dpfed.algorithms.dp_scaffold import DPScaffold

_ALL: tuple[type[Algorithm], ...] = (
    DPFedAdamW,
    DPFedAvg,
    DPScaffold,
    DPFedAvgLS,
    DPFedSAM,
    DPLocalAdamW,
    DPFedOpt,
    DPFAFED,
    DPFedLADA,
    DPAdamBC,
    DPFedAdamWPrinted,
)
REGISTRY: dict[str, type[Algorithm]] = {cls.name: cls for cls in _ALL}
