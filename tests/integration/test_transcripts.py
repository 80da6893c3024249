"""Every shape of stream, byte for byte as it was when somebody last looked at it."""

from tests.transcripts import CASES, FOLDER, speaking_world, transcript_of


async def test_every_stream_is_what_it_was() -> None:
    async with speaking_world() as w:
        for name, case in CASES.items():
            assert await transcript_of(w, case) == (FOLDER / f"{name}.txt").read_text(), name


def test_every_transcript_has_its_case() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(CASES)
