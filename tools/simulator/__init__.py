"""``paternoster simulate``: the real scheduler in virtual time, with arithmetic in place of executors and people.

``workload`` says who comes when, ``costs`` how long a step takes, ``engine`` runs the scheduler's core against both,
``figures`` sums up, ``sweep`` runs it over and over, ``command`` is the command line. Nothing here plans: every
decision is the core's.
"""
