"""Draft an entry for OpenDP's public registry of DP deployments from a run's privacy statement.

The entry follows `schemas/deployments-schema.yaml` in opendp/deployments-registry-data, as read in
November 2026. Nanayakkara and others (arXiv 2509.13509) describe this schema.
`registry_schema.json` beside this file contains the keys, types and permitted values of the schema.
The publisher of the model fills in facts that a run does not know, such as the intended use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpfed.errors import DpfedError
from dpfed.report.statement.build import Guarantee, Statement
from dpfed.report.statement.text import first_line, rows

REGISTRY_SCHEMA = Path(__file__).with_name("registry_schema.json")
TO_FILL_IN = "TO BE FILLED IN by the curator"


def registry_entry(statement: Statement) -> dict[str, Any]:
    """Return a draft of the run's registry entry as JSON values.

    Raise DpfedError for a run without privacy.
    """
    guarantee = statement.guarantee
    if guarantee is None:
        raise DpfedError("a run without privacy has no entry in the registry of DP deployments")
    sentences = dict(rows(statement))
    return {
        "url_slug": TO_FILL_IN,
        "status": "Draft",
        "tier": 3,
        "deployment": {
            "basic": _basic(statement),
            "dp_variant": {
                "variant_name": "Approximate DP",
                "data_domain": "sets of training records, one set for each client",
                "unprotected_quantities": sentences["Assumed public"],
            },
            "privacy_loss": _privacy_loss(guarantee, sentences),
            "deployment_model": {
                "model_name": "Federated",
                "actors": f"Server: {sentences['Server']} Third party: {sentences['Third party']}",
                "release_type": "One release",
                "data_source_type": "Static",
                "access_type": "Non-interactive",
            },
            "accounting": {
                "post_processing": "everything that follows the noised gradients of the clients",
                "composition": f"{sentences['Accountant']} {sentences['Participation']} "
                f"Spent before: {sentences['Spent before']}",
            },
            "implementation": {
                "preprocessing_and_hyperparameter_tuning": sentences["Not covered"],
                "mechanisms": f"{sentences['Mechanism']} {sentences['Software']}",
                "justification": TO_FILL_IN,
            },
            "administrative": {
                "sources": TO_FILL_IN,
                "notes": f"{first_line(statement)} Ledger head: {sentences['Ledger head']}.",
                "registry_authors": [TO_FILL_IN],
            },
        },
    }


def _basic(statement: Statement) -> dict[str, Any]:
    return {
        "name": TO_FILL_IN,
        "data_curators": [TO_FILL_IN],
        "intended_use": TO_FILL_IN,
        "data_product_type": "Machine learning model",
        "data_product_region": TO_FILL_IN,
        "description": f"a model fine-tuned by {statement.algorithm or 'dpfed'}",
        "publication_date": TO_FILL_IN,
    }


def _privacy_loss(guarantee: Guarantee, sentences: dict[str, str]) -> dict[str, Any]:
    return {
        "privacy_unit": f"one {guarantee.unit} of one client",
        "privacy_unit_details": sentences["Protected"],
        "privacy_parameters": {
            "epsilon": guarantee.observers[0].epsilon,
            "delta": guarantee.delta.value,
        },
        "privacy_parameters_details": f"{sentences['Delta']} Attack: {sentences['Attack']} "
        f"Mu: {sentences['Mu']}",
    }
