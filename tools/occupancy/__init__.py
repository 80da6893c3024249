"""The picture of continuous batching: lanes by steps, coloured by request.

``record`` reads it off the scheduler's events and actions, whoever drives the core; ``text`` and ``page`` draw it.
"""
