"""Flower underneath a federation: its SuperLink and SuperNodes carry the bytes, `dpfed.federation` decides what they say.

    child.py       a SuperLink or SuperNode as a child process that ends with its parent
    link.py        the server's side: registers the clients' keys, opens a run, hands back Flower's Grid
    transport.py   `Transport` over a Grid: names -> nodes, timeouts, answers held against who was asked
    node.py        the client's side: takes tasks from its SuperNode and answers them with its own code
    apps.py        the ClientApp and ServerApp, also for people who use Flower's own commands
    parcel.py      request and reply bytes in Flower's messages

A SuperNode as Flower starts it runs whatever code the server has sent along. Here none of that is ever installed or
imported: `node.py` answers with the dpfed that the client has installed, whatever the server's app holds.

Nothing here is imported unless a federation runs: `pip install dpfed[flower]`.
"""
