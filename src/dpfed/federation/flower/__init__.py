"""Connect server and clients through Flower, which transports bytes of `federation.messages`.

    processes.py    runs Flower's commands: SuperLink, SuperNode and `flwr`
    keeper.py       the process around a SuperLink or SuperNode, which ends it with its parent
    guard.py        the reverse proxy in a keeper: which requests and which apps pass
    session.py      the server's side: registers client keys and opens a run
    apps.py         Flower's ClientApp and ServerApp, which pass bytes on
    app_folder.py   the folder that `flwr run` takes
    relay.py        bytes between two processes of one machine
    post.py         messages to nodes, through Flower's Grid or through the relay
    transport.py    sends requests to clients by name, with timeouts, and checks who has replied
    answering.py    answers the requests that a ClientApp passes on
    header.py       short texts beside a message; `envelope.py` puts both into Flower's messages

Only Flower's documented commands and the modules `flwr.app`, `flwr.clientapp` and `flwr.serverapp`
are used. By itself, a SuperNode runs the code that the server sends. The guard lets only an app
without code pass, which names functions of the dpfed that the client has installed.

These modules need `pip install dpfed[flower]`, so they are imported only when a federation runs.
"""
