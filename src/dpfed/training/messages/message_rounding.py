"""Round the vectors of a run's messages, equally in simulations and at a federation server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpfed.algorithms.base import Message
from dpfed.config import FederationSection
from dpfed.privacy.noise import Streams
from dpfed.training.job.job import Job
from dpfed.training.messages.message_format import Layout, decode, draws, encode
from dpfed.training.messages.message_size import layouts


@dataclass(frozen=True)
class MessageRounding:
    """Rounds the messages of a run to the formats in which they are sent, such as int8.

    up       formats of the vectors in a client's message to the server
    down     formats of the vectors in the server's broadcast to the clients
    streams  random streams of the run, which decide the stochastic rounding
    """

    up: Layout
    down: Layout
    streams: Streams

    def broadcast(self, t: int, server: Any) -> dict[str, Tensor]:
        """Return the tensors that the server sends in round t.

        All clients get the same tensors, and a server that is restarted sends the same again.
        """
        fields = {name: getattr(server, name) for name in self.down}
        return encode(fields, self.down, draws(self.streams, "download", t))

    def received(self, t: int, server: Any) -> Any:
        """Return the server's state as clients receive it in round t, after rounding."""
        if not _rounds(self.down):
            return server
        return replace(server, **decode(self.broadcast(t, server), self.down))

    def answers(self, t: int, clients: Sequence[int], message: Message) -> Message:
        """Return the clients' messages of round t as the server receives them, rounded.

        message  tensors `[S, ...]` by name, one row for each of S clients
        """
        if not _rounds(self.up):
            return message
        rows = []
        for row, client in enumerate(clients):
            fields = {name: message[name][row] for name in self.up}
            sent = encode(fields, self.up, draws(self.streams, "upload", t, client))
            rows.append(decode(sent, self.up))
        return {name: torch.stack([fields[name] for fields in rows]) for name in self.up}


def message_rounding(job: Job, section: FederationSection | None) -> MessageRounding:
    """Return the rounding of messages that the section [federation] of the configuration sets.

    Without this section, messages are in float32 and nothing is rounded.
    """
    up, down = layouts(job.algorithm, job.space, section, job.plan.clipping.counts)
    return MessageRounding(up, down, job.streams)


def _rounds(layout: Layout) -> bool:
    return any(field.format != "float32" for field in layout.values())
