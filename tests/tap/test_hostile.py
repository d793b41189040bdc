"""Requests that are broken or mean: each gets an answer that its sender can read, and nobody else notices.

Limits are set low so that running into them takes no time; nothing here depends on how long anything takes.
"""

from __future__ import annotations

import copy
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime_plugin.tap.limits import ServerSettings
from tests.tap.hostile import AUTH, LOW, PATHS, VALID, check_served, request, send, told
from tests.tap.http import Serving, serving


@pytest.fixture(scope="module")
def house() -> Iterator[Serving]:
    with serving(settings=LOW) as server:
        yield server


@pytest.fixture
def server(house: Serving) -> Iterator[Serving]:
    yield house
    check_served(house)


class TestBodies:
    def test_half_an_emoji_is_no_reason_to_refuse(self, server: Serving) -> None:
        """An agent that cuts texts by the length that JavaScript gives them writes such."""
        body = b'{"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "cut \\ud83d"}]}'
        assert httpx.post(server.url + PATHS[0], content=body, headers=AUTH).status_code == 200
        response = httpx.post(server.url + PATHS[0], content=body.replace(b"9", b"NaN"), headers=AUTH)
        assert (response.status_code, told(response, PATHS[0])) == (400, "invalid_request_error")

    @pytest.mark.parametrize("path", PATHS)
    def test_a_name_that_is_a_novel(self, server: Serving, path: str) -> None:
        response = httpx.post(server.url + path, json=VALID[path] | {"model": "m" * 201}, headers=AUTH)
        assert (response.status_code, "201 characters" in response.text) == (400, True)

    def test_too_many_brackets(self) -> None:
        with serving(settings=ServerSettings(max_brackets=100)) as server:
            path = PATHS[0]
            response = httpx.post(server.url + path, json=VALID[path] | {"metadata": [[]] * 100}, headers=AUTH)
            assert (response.status_code, told(response, path)) == (413, "request_too_large")

    def test_too_much_at_once(self) -> None:
        """Bodies that are held back one byte before their end, and what they take is given back."""
        path, size = PATHS[0], 10_000
        with serving(settings=ServerSettings(max_inflight_bytes=3 * size)) as server:
            held = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(3)]
            for connection in held:
                connection.sendall(request(path, b" " * size)[:-1])
            body = VALID[path] | {"metadata": {"x": "y" * size}}

            def until(status: int) -> httpx.Response:
                """What the server reads of other connections, it reads when it likes."""
                while (response := httpx.post(server.url + path, json=body, headers=AUTH)).status_code != status:
                    assert response.status_code in (200, 529)
                return response

            assert told(until(529), path) == "overloaded_error"
            for connection in held:
                connection.close()
            until(200)

    @pytest.mark.parametrize("path", [*PATHS, "/v1/messages/count_tokens"])
    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"{",
            b'{"model": "m", "messages": [',
            b"null",
            b"[]",
            b'"hi"',
            b"\xff\xfe",
            b'{"model": "\xc3\x28"}',
            b'{"model": "\\ud800"}',
            b'{"model": NaN}',
            b'{"max_tokens": ' + b"9" * 10**5 + b"}",
            b'{"max_tokens": 1e999}',
            b"\xef\xbb\xbf{}",
            b'{"a":' * 100 + b"1" + b"}" * 100,
            b"[" * 10**5,
            b'{"a":' * 10**5 + b"1" + b"}" * 10**5,
        ],
    )
    def test_not_what_they_should_be(self, server: Serving, path: str, body: bytes) -> None:
        response = httpx.post(server.url + path, content=body, headers=AUTH)
        assert (response.status_code, told(response, path)) == (400, "invalid_request_error")

    def test_depth_in_places_nobody_looks_at(self, server: Serving) -> None:
        body = VALID["/v1/messages"] | {"metadata": json.loads("[" * 80 + "]" * 80)}
        response = httpx.post(f"{server.url}/v1/messages", json=body, headers=AUTH)
        assert response.status_code == 400
        assert "64 deep" in response.json()["error"]["message"]

    @pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip"])
    def test_compressed(self, server: Serving, encoding: str) -> None:
        response = httpx.post(f"{server.url}/v1/messages", content=b"x", headers=AUTH | {"content-encoding": encoding})
        assert (response.status_code, told(response, "/v1/messages")) == (400, "invalid_request_error")

    @pytest.mark.parametrize("path", PATHS)
    def test_too_large_by_its_own_word(self, server: Serving, path: str) -> None:
        """It is refused unread."""
        answer = send(server, request(path, b"", f"content-length: {10**8}"))
        assert answer.startswith(b"HTTP/1.1 413 ")

    def test_who_has_no_token_is_not_waited_for(self) -> None:
        """The answer comes before the rest of the body is thrown away, and asks for none of it."""
        with (
            serving(settings=replace(LOW, discard_timeout_s=600)) as server,
            socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection,
        ):
            head = f"POST {PATHS[0]} HTTP/1.1\r\nhost: tap\r\nexpect: 100-continue\r\ncontent-length: 9000\r\n\r\n"
            connection.sendall(head.encode())
            assert connection.recv(2**16).startswith(b"HTTP/1.1 401 ")

    @pytest.mark.parametrize("chunked", [False, True])
    def test_too_large(self, server: Serving, chunked: bool) -> None:
        """Of 100 MB, the server takes no more than it reads, throws away and the system buffers."""
        length = "transfer-encoding: chunked" if chunked else f"content-length: {10**8}"
        piece = b"x" * 2**16
        piece = b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(request("/v1/messages", b"", length))
            sent = 0
            try:
                while sent < 10**8:
                    sent += connection.send(piece)
            except (BrokenPipeError, ConnectionResetError):
                pass
        assert sent < 10**7 * 3

    def test_too_large_is_told(self, server: Serving) -> None:
        response = httpx.post(f"{server.url}/v1/messages", content=b"x" * (2**20 + 1), headers=AUTH)
        assert (response.status_code, told(response, "/v1/messages")) == (413, "request_too_large")
        pieces = (b"x" * 2**16 for _ in range(20))
        response = httpx.post(f"{server.url}/v1/responses", content=pieces, headers=AUTH)
        assert (response.status_code, told(response, "/v1/responses")) == (413, "invalid_request_error")

    def test_slow(self, server: Serving) -> None:
        answer = send(server, request("/v1/chat/completions", b'{"model"', "content-length: 100"))
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"request_timeout" in answer

    def test_truncated(self, server: Serving) -> None:
        asked = len(server.rollout.asked)
        answer = send(server, request("/v1/messages", b'{"model"', "content-length: 100"), half_close=True)
        assert answer == b""
        assert len(server.rollout.asked) == asked

    def test_broken_chunks(self, server: Serving) -> None:
        answer = send(server, request("/v1/messages", b"zz\r\nhello\r\n", "transfer-encoding: chunked"))
        assert answer.startswith(b"HTTP/1.1 400 ")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from places(child, (*path, key))


def changed(body: dict[str, Any], where: tuple[Any, ...], new: Any) -> dict[str, Any]:
    body = copy.deepcopy(body)
    target: Any = body
    for key in where[:-1]:
        target = target[key]
    if new is DELETED:
        del target[where[-1]]
    else:
        target[where[-1]] = new
    return body


DELETED = object()
STRANGE = [DELETED, None, True, 0, -1, 2**70, 1.5, "", "x", "image", "tool", "user", [], {}, [None], [[]], {"type": 1}]


@pytest.fixture(scope="module")
def client(house: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=house.url, headers=AUTH) as client:
        yield client


@pytest.mark.parametrize("path", PATHS)
def test_any_field_may_be_wrong(server: Serving, client: httpx.Client, path: str) -> None:
    """Every field of a valid body, replaced by every strange value."""
    for where in places(VALID[path]):
        for new in STRANGE:
            response = client.post(path, json=changed(VALID[path], where, new))
            if response.status_code != 200:
                assert (response.status_code, where, new) == (400, where, new)
                told(response, path)


class TestMutations:
    @pytest.mark.parametrize("path", PATHS)
    @given(data=st.data())
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
    def test_several_at_once(self, client: httpx.Client, path: str, data: st.DataObject) -> None:
        body = VALID[path]
        scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False)
        for _ in range(data.draw(st.integers(1, 4))):
            where = data.draw(st.sampled_from(list(places(body)) or [("model",)]))
            donor = data.draw(st.sampled_from(list(places(VALID[path]))))
            graft: Any = VALID[path]
            for key in donor:
                graft = graft[key]
            body = changed(body, where, data.draw(st.sampled_from([graft, DELETED]) | scalars | st.lists(scalars)))
        content = json.dumps(body).encode()
        cut = data.draw(st.none() | st.integers(0, len(content)))
        response = client.post(path, content=content[:cut])
        assert response.status_code in (200, 400)
        if response.status_code == 400:
            told(response, path)
