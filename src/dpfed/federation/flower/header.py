"""Keys of the header: short strings that accompany the bytes of a request or a reply.

The nonce is a random string in each request that only the server and the asked client know. Flower
checks the key of each connected node (client), but not that a reply comes from the node that the
reply names. Therefore, the server rejects a reply without the nonce of the request as forged.
"""

from __future__ import annotations

NONCE = "ticket"
REFUSED = "refused"
NAME = "name"
# Largest length, in characters, of the sentence by which a client refuses a request.
MAX_TEXT = 300
