"""Connect server and clients through Flower, which transports bytes of `federation.messages`.

    child.py       runs a SuperLink or SuperNode as a child process that ends with its parent
    link.py        the server's side: registers client keys, opens a run, returns Flower's Grid
    transport.py   sends requests to clients by name, with timeouts, and checks who has replied
    node.py        the client's side: takes tasks from its SuperNode and answers them
    apps.py        the ClientApp and ServerApp, also for Flower's own commands
    envelope.py    request and reply bytes in Flower's messages

By itself, a SuperNode of Flower runs the code that the server sends. `node.py` never installs or
imports this code: it answers with the dpfed that the client has installed.

These modules need `pip install dpfed[flower]`, so they are imported only when a federation runs.
"""
