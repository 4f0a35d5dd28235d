"""Flower below a federation: its SuperLink and SuperNodes carry the bytes of `federation.messages`.

    child.py       a SuperLink or SuperNode as a child process that ends with its parent
    link.py        the server's side: registers client keys, opens a run, returns Flower's Grid
    transport.py   `Transport` over a Grid: nodes by name, timeouts, checks of the sender
    node.py        the client's side: takes tasks from its SuperNode and answers them
    apps.py        the ClientApp and ServerApp, also for Flower's own commands
    envelope.py    request and reply bytes in Flower's messages

Flower's own SuperNode runs the code that the server sends. `node.py` never installs or imports that
code: it answers with the client's own dpfed.

These modules are imported only when a federation runs: `pip install dpfed[flower]`.
"""
