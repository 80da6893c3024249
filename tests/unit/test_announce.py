import asyncio

from tools.announce import reachable, ready_lines, wait_until_ready


def test_it_waits_through_refusals_and_503_until_ready() -> None:
    answers = iter([b"", b"nonsense\r\n", b"HTTP/1.1 503 Service Unavailable\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"])
    asked = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(next(answers))
        writer.close()
        await writer.wait_closed()

    async def test() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            await asyncio.wait_for(wait_until_ready("127.0.0.1", server.sockets[0].getsockname()[1]), 10)

    asyncio.run(test())
    assert len(asked) == 4
    assert asked[0].startswith(b"GET /ready HTTP/1.1\r\n")


def test_the_ready_lines_hold_a_command_that_can_be_pasted() -> None:
    first, second = ready_lines("0.0.0.0", 8000, "small", 2, needs_key=True)
    assert first == "Paternoster is ready: small on 2 executors at http://127.0.0.1:8000 - try:"
    assert "curl -N http://127.0.0.1:8000/v1/chat/completions" in second
    assert "-H 'Authorization: Bearer YOUR_KEY'" in second
    assert "1 executor at http://[::1]:8000" in next(ready_lines("::", 8000, "small", 1, needs_key=False))


def test_the_ready_lines_of_a_server_with_tls() -> None:
    first, second = ready_lines("127.0.0.1", 8443, "small", 1, needs_key=False, tls=True)
    assert first.endswith("at https://127.0.0.1:8443 - try:")
    assert "curl -N https://127.0.0.1:8443/" in second


def test_reachable() -> None:
    assert [reachable(host) for host in ("0.0.0.0", "::", "10.0.0.1")] == ["127.0.0.1", "::1", "10.0.0.1"]
