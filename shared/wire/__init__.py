"""The messages between the services, as data. No sockets, no clocks, no behaviour.

``gateway`` holds the messages of the gateway link, ``executor`` those of the executor link, ``session`` those that
open and keep a session on either link, ``sampling``, ``logprobs`` and ``facts`` what several messages carry, ``tokens``
the columns in which what is hot travels, and ``codec`` turns messages into bytes and back.
"""
