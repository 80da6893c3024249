"""Every shape of stream, byte for byte as it was when somebody last looked at it."""

import pytest

from tests.transcripts import CASES, FOLDER, transcript_of


@pytest.mark.parametrize("name", CASES)
async def test_a_stream_is_what_it_was(name: str) -> None:
    assert await transcript_of(CASES[name]) == (FOLDER / f"{name}.txt").read_text()


def test_every_transcript_has_its_case() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(CASES)
