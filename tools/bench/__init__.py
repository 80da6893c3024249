"""Measurements of a server, as commands of ``paternoster bench``."""
