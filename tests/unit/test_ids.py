"""Ids are new, also after a restart; seeds are 63 bits."""

import subprocess
import sys

from services.gateway.ids import new_id, random_seed

_TEN = "from services.gateway.ids import new_id; print(*(new_id() for _ in range(10)))"


def test_no_two_ids_are_alike_in_one_process_or_in_two() -> None:
    ids = [new_id() for _ in range(1000)]
    ids += subprocess.run([sys.executable, "-c", _TEN], capture_output=True, text=True, check=True).stdout.split()
    assert len(set(ids)) == 1010
    assert {len(each) for each in ids} == {24}


def test_seeds_are_63_bits_and_differ() -> None:
    seeds = {random_seed() for _ in range(1000)}
    assert len(seeds) == 1000
    assert 2**62 < max(seeds) < 2**63
