"""What the three services have in common: the messages, the links, settings, logs and metrics.

Imports nothing of ``services`` or ``tools``.
"""
