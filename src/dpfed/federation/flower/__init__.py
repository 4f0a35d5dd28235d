"""Connect server and clients through Flower, which transports bytes of `federation.messages`.

    processes.py    runs Flower's commands: SuperLink, SuperNode and `flwr`
    keeper.py       the process around a SuperLink or SuperNode, which ends it with its parent
    guard.py        the reverse proxy in a keeper: which requests and which apps pass
    session.py      the server's side: registers client keys and opens a run
    apps.py         Flower's ClientApp and ServerApp, which pass bytes on
    app_folder.py   the folder that `flwr run` takes
    relay.py        exchange of bytes between two processes of one machine
    post.py         messages to nodes, through Flower's Grid or through the relay
    transport.py    sends requests to clients by name, with timeouts, and checks who has replied
    answering.py    answers the requests that a ClientApp passes on
    header.py       short texts beside a message; `envelope.py` puts both into Flower's messages

Only Flower's documented commands and the modules `flwr.app`, `flwr.clientapp` and `flwr.serverapp`
are used. Without the guard, a SuperNode would run any code that the server sends. The guard accepts
only an app that contains no code. Such an app names functions of the client's own dpfed.

These modules need `pip install dpfed[flower]`, so they are imported only when a federation runs.
"""
