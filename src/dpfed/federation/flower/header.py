"""Names of the short texts beside the bytes of a request or a reply.

The nonce is a random text in each request that only the server and this client know. Flower checks
the key of each connected node. It does not check that a reply comes from the node that the reply
names. The server therefore rejects a reply without the nonce as forged.
"""

from __future__ import annotations

NONCE = "ticket"
REFUSED = "refused"
NAME = "name"
# Longest text of a refusal, in characters.
MAX_TEXT = 300
