"""Records the journals of ``tests/data/journals``, by hand, after decisions were changed on purpose; see its README."""

import asyncio
import sys
import tempfile
from pathlib import Path

from services.scheduler.journal_format import MAGIC, Handled, Reader, append, digest
from tests.e2e.prompts import Prompt
from tests.e2e.streams import Said, stream
from tests.e2e.system import System
from tests.fakes.waiting import await_until
from tools import replay

FOLDER = Path(__file__).parent / "data" / "journals"


async def _streams(system: System, count: int, max_tokens: int, kill: bool) -> None:
    async with system.async_client(timeout=60) as client:
        said = [Said() for _ in range(count)]
        tasks = [
            asyncio.create_task(
                stream(
                    client,
                    Prompt(f"number {n} " + "x" * n, chat=False),
                    said[n],
                    seed=n,
                    max_tokens=max_tokens,
                    temperature=0.8,
                    extra_body={"ignore_eos": True},
                )
            )
            for n in range(count)
        ]
        if kill:
            await await_until(lambda: all(len(each.token_ids) >= 5 for each in said), 30, "all streams are under way")
            system.kill("executor")
        await asyncio.gather(*tasks)


def _record(name: str, count: int, max_tokens: int, kill: bool, **options: object) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        system = System(journal=str(path), faults={"step_ms": 5}, **options)  # type: ignore[arg-type]
        try:
            system.start()
            asyncio.run(_streams(system, count, max_tokens, kill))
            system.stop()
        finally:
            system.close()
        replayed = replay.run(Reader(path))
        print(name, path.stat().st_size, "bytes", replayed.scheduler.counters)
        (FOLDER / name).write_bytes(path.read_bytes())


def again(path: Path) -> None:
    """Write new digests for the same events."""
    reader = Reader(path)
    scheduler = replay.begin(reader.opening)
    buffer = bytearray(MAGIC)
    append(buffer, reader.opening)
    for handled in reader:
        actions = scheduler.handle(handled.event, handled.now_ms)
        append(buffer, Handled(handled.now_ms, digest(actions), handled.event))
    if scheduler.counters.violations or reader.damage:
        sys.exit(f"{path}: the events no longer fit the plans of this core {reader.damage}")
    path.write_bytes(buffer)


if __name__ == "__main__":
    if sys.argv[1:]:
        for argument in sys.argv[1:]:
            again(Path(argument))
    else:
        _record("preemption.journal", 8, 40, False, num_blocks=24, block_size=4, max_lanes=4, max_step_tokens=32)
        _record("executor-lost.journal", 6, 40, True, executors=2, num_blocks=64, block_size=4, max_lanes=4)
