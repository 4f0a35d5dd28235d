"""Connect server and clients through Flower, which transports bytes of `federation.messages`.

Flower's SuperLink is its process at the server, a SuperNode (or node) is its process at a client.
Both start apps: a ServerApp at the server, a ClientApp at a client.

    processes.py    runs Flower's commands: SuperLink, SuperNode and `flwr`
    keeper.py       the parent process of a SuperLink or SuperNode, which ends it when dpfed ends
    guard.py        the reverse proxy in front of a SuperLink or SuperNode: filters requests and
                    apps
    session.py      the server's side: registers client keys and starts the ServerApp
    apps.py         Flower's ClientApp and ServerApp, which only pass bytes on
    app_folder.py   the app folder that the command `flwr run` needs
    relay.py        exchange of bytes between two processes on one machine
    post.py         messages to nodes, through Flower's Grid or through the relay
    transport.py    sends requests to clients by name, with timeouts, and checks who has replied
    answering.py    answers the requests that a ClientApp passes on
    header.py       keys of the short strings that accompany the bytes of a message
    envelope.py     puts these strings and bytes into Flower's messages

Only Flower's documented commands and the modules `flwr.app`, `flwr.clientapp` and `flwr.serverapp`
are used. Without the guard, a SuperNode would run any code that the server sends. The guard accepts
only an app that contains no code. Such an app only gives the names of functions, which the client's
own dpfed contains.

These modules need `pip install dpfed[flower]`, so they are imported only when a federation runs.
"""
