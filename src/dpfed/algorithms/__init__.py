"""One file per optimizer. `base.py` is the contract; adding one is a file here, a line below and a test."""

from __future__ import annotations

from dpfed.algorithms.base import Algorithm
from dpfed.algorithms.dp_fedadamw import DPFedAdamW
from dpfed.algorithms.dp_fedavg import DPFedAvg
from dpfed.algorithms.dp_fedsam import DPFedSAM
from dpfed.algorithms.dp_local_adamw import DPLocalAdamW

REGISTRY: dict[str, type[Algorithm]] = {cls.name: cls for cls in (DPFedAdamW, DPFedAvg, DPFedSAM, DPLocalAdamW)}
