"""The real containers on a real Docker engine. Run by tests/compose/run, not by a plain pytest: it takes minutes."""
