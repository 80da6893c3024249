"""The links between the processes: pyzmq sockets driven by the asyncio loop, and the sessions on them.

``router`` is the scheduler's side of a link, ``dealer`` the other one. ``session`` names what both agree on;
``options`` sets every socket option; ``curve`` has the keys for hosts apart; ``liveness`` decides (purely) when a
silent peer is lost; ``loop`` ties a socket to the event loop; ``crash`` carries an exception out of a callback to the
process's main. Only shells and links import these.
"""
