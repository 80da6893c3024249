import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.bench.http import EventParser, HttpError, ResponseParser, Server

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"
    b"5\r\nhello\r\n1;note=x\r\n \r\n7\r\nw\r\norld\r\n0\r\n\r\n"
)
PLAIN = b"HTTP/1.1 404 Not Found\r\nContent-Length: 12\r\n\r\nhello w\r\norl"
EVENTS = ': ping\r\n\r\ndata: {"a": "ü"}\n\ndata: one\ndata: two\n\nevent: x\nid: 3\n\ndata:[DONE]\r\n\r\n'.encode()


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


CUTS = st.lists(st.integers(0, 500), max_size=20)


@given(CUTS, st.sampled_from([(CHUNKED, 200, b"hello w\r\norld"), (PLAIN, 404, b"hello w\r\norl")]))
def test_a_response_cut_anywhere_gives_the_same_body(cuts: list[int], case: tuple[bytes, int, bytes]) -> None:
    data, status, body = case
    parser = ResponseParser()
    assert b"".join(parser.feed(piece) for piece in pieces(data, cuts)) == body
    assert (parser.status, parser.done) == (status, True)


@given(CUTS)
def test_events_cut_anywhere_are_the_same_events(cuts: list[int]) -> None:
    parser = EventParser()
    events = [event for piece in pieces(EVENTS, cuts) for event in parser.feed(piece)]
    assert events == ['{"a": "ü"}'.encode(), b"one\ntwo", b"[DONE]"]


@pytest.mark.parametrize("length", range(1, len(CHUNKED) - 2))
def test_an_answer_cut_short_is_an_error(length: int) -> None:
    parser = ResponseParser()
    parser.feed(CHUNKED[:length])
    with pytest.raises(HttpError, match="in the middle"):
        parser.end()


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.0 200 OK\r\n\r\nall") + parser.feed(b" of it") == b"all of it"
    parser.end()
    assert parser.done


@pytest.mark.parametrize("data", [b"SSH-2.0-x\r\n\r\n", b"x" * 70_000, CHUNKED.replace(b"5\r\n", b"z\r\n")])
def test_what_is_no_http_is_an_error(data: bytes) -> None:
    with pytest.raises(HttpError):
        ResponseParser().feed(data)


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("http://127.0.0.1:8000", Server("127.0.0.1", 8000, "", False)),
        ("localhost:8000/v1/", Server("localhost", 8000, "", False)),
        ("https://api.example/base/v1", Server("api.example", 443, "/base", True)),
        ("http://[::1]:9", Server("::1", 9, "", False)),
    ],
)
def test_urls(url: str, server: Server) -> None:
    assert Server.at(url) == server


def test_what_is_no_url() -> None:
    with pytest.raises(ValueError, match="not an http or https URL"):
        Server.at("ftp://x")


def test_a_request_carries_its_length_and_the_key() -> None:
    head, _, body = (
        Server.at("http://h:1/base", "sk-x").request("POST", "/v1/completions", {"a": "ü"}).partition(b"\r\n\r\n")
    )
    assert head.startswith(b"POST /base/v1/completions HTTP/1.1\r\nHost: h:1\r\n")
    assert b"Authorization: Bearer sk-x" in head
    assert f"Content-Length: {len(body)}".encode() in head
    assert json.loads(body) == {"a": "ü"}
