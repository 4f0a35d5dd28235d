"""Connect server and clients through Flower: it carries the bytes of `federation.messages`.

    child.py       runs a SuperLink or SuperNode as a child process that ends with its parent
    link.py        the server's side: registers client keys, opens a run, returns Flower's Grid
    transport.py   sends requests to clients by name, with timeouts, and checks who has replied
    node.py        the client's side: takes tasks from its SuperNode and answers them
    apps.py        the ClientApp and ServerApp, also for Flower's own commands
    envelope.py    request and reply bytes in Flower's messages

Flower's own SuperNode runs the code that the server sends. `node.py` never installs or imports that
code: it answers with the client's own dpfed.

These modules need `pip install dpfed[flower]`, so they are imported only when a federation runs.
"""
