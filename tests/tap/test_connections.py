"""Connections, paths and tokens that are wrong: told so or hung up on, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import select
import socket
from collections.abc import Iterator

import httpx
import pytest

from slime_plugin.tap.limits import ServerSettings
from slime_plugin.tap.payload import Answer, ClientRequest
from slime_plugin.tap.server import ListenError, TapServer
from tests.tap.hostile import AUTH, LOW, PATHS, VALID, check_served, receive, request, send, told
from tests.tap.http import TOKEN, Rollouts, Serving, saying, serving


@pytest.fixture(scope="module")
def house() -> Iterator[Serving]:
    with serving(settings=LOW) as server:
        yield server


@pytest.fixture
def server(house: Serving) -> Iterator[Serving]:
    yield house
    check_served(house)


class TestConnections:
    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"POST /v1/mess",
            b"POST /v1/messages HTTP/1.1\r\nhost: tap\r\nx-a: ",
        ],
    )
    def test_slow_headers(self, server: Serving, data: bytes) -> None:
        """The server hangs up, or this would wait for ever."""
        assert send(server, data) == b""

    def test_slow_headers_of_a_second_request(self, server: Serving) -> None:
        answer = send(server, b"GET /health HTTP/1.1\r\nhost: tap\r\n\r\nGET /hea")
        assert answer.count(b"HTTP/1.1 200") == 1

    def test_a_byte_now_and_then_does_not_help(self, server: Serving) -> None:
        with socket.create_connection(("127.0.0.1", server.port), timeout=0.05) as connection:
            closed = False
            for byte in b"GET /health HTTP/1.1\r\nx-long: " + b"a" * 400:
                try:
                    connection.send(bytes([byte]))
                    closed = connection.recv(1) == b""
                except TimeoutError:
                    continue
                except OSError:
                    closed = True
                if closed:
                    break
        assert closed

    @pytest.mark.parametrize(
        "data",
        [
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50,
            b"hello\r\n\r\n",
            b"GET /health\r\n\r\n",
            b"\r\n\r\n",
            b"GET /\x00 HTTP/1.1\r\nhost: tap\r\n\r\n",
            b"POST /v1/messages HTTP/1.1\r\nhost: tap\r\ncontent-length: -1\r\n\r\n",
            b"POST /v1/messages HTTP/1.1\r\nhost: tap\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
            b"GET /health HTTP/1.1\r\n\r\n",
            b"GET /health HTTP/1.1\r\nhost: tap\r\nx-huge: " + b"a" * 2**15,
            b"GET http:///\xff HTTP/1.1\r\nhost: tap\r\n\r\n",
        ],
    )
    def test_no_http(self, server: Serving, data: bytes) -> None:
        assert send(server, data).startswith(b"HTTP/1.1 400 ")

    def test_half_closed(self, server: Serving) -> None:
        """A client that has said its last byte has hung up: nothing else tells the one from the other."""
        body = json.dumps(VALID["/v1/messages"]).encode()
        answer = send(server, request("/v1/messages", body), half_close=True)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 200")

    def test_pipelined(self, server: Serving) -> None:
        """Answered one after the other, in order."""
        bodies = [json.dumps({"model": f"m{i}", "input": "hi"}).encode() for i in range(3)]
        last = request("/v1/responses", bodies[-1], "connection: close")
        answer = send(server, b"".join(request("/v1/responses", body) for body in bodies[:-1]) + last)
        assert answer.count(b"HTTP/1.1 200 OK") == 3
        assert answer.index(b'"model":"m0"') < answer.index(b'"model":"m1"') < answer.index(b'"model":"m2"')

    def test_too_many(self) -> None:
        """Those beyond the limit are told so, and room comes back when others leave."""
        with serving(settings=ServerSettings(max_connections=2)) as server:
            held = [httpx.Client(base_url=server.url, headers=AUTH) for _ in range(3)]
            for client in held[:2]:
                assert client.get("/v1/models").status_code == 200
            for path, status, kind in ((PATHS[0], 529, "overloaded_error"), (PATHS[1], 503, "server_error")):
                response = held[2].post(path, json=VALID[path])
                assert (response.status_code, told(response, path)) == (status, kind)
                assert held[0].get("/v1/models").status_code == 200, "those who were there first are served"
            for client in held:
                client.close()
            with httpx.Client(base_url=server.url, headers=AUTH, transport=httpx.HTTPTransport(retries=5)) as client:
                assert client.get("/health").status_code == 200

    def test_those_who_ask_nothing_give_way(self) -> None:
        """Whoever holds connections and says nothing keeps nobody out."""
        with serving(settings=ServerSettings(max_connections=4, head_timeout_s=600)) as server:
            silent = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(40)]
            with httpx.Client(base_url=server.url, headers=AUTH) as client:
                assert client.post(PATHS[0], json=VALID[PATHS[0]]).status_code == 200
                assert silent[0].recv(1) == b""
                assert client.post(PATHS[0], json=VALID[PATHS[0]]).status_code == 200, "it is still connected"
            for connection in silent:
                connection.close()

    @pytest.mark.parametrize("token", [TOKEN, "wrong"])
    def test_a_body_in_crumbs(self, server: Serving, token: str) -> None:
        head = f"POST {PATHS[0]} HTTP/1.1\r\nhost: tap\r\nx-api-key: {token}\r\ntransfer-encoding: chunked\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(head.encode())
            crumbs = b"1\r\n \r\n" * 10**6
            with pytest.raises(ConnectionError):
                connection.sendall(crumbs)

    def test_a_wrong_token_is_hung_up_on(self, server: Serving) -> None:
        answer = send(server, request(PATHS[0], b"{}").replace(TOKEN.encode(), b"wrong"))
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert b"connection: close" in answer.lower()

    def test_an_answer_that_nobody_reads(self) -> None:
        """The server drops it, and has room for another connection while the client keeps its end open."""
        long = saying("x" * 2**25)
        with (
            serving(lambda ask: long, ServerSettings(send_timeout_s=0.2, max_connections=1)) as server,
            socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection,
        ):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(request(PATHS[1], json.dumps(VALID[PATHS[1]]).encode()))
            assert server.rollout.working.wait(20)
            while (status := httpx.get(f"{server.url}/health").status_code) != 200:
                assert status == 503
            assert len(receive(connection)) < 2**25


class TestPaths:
    @pytest.mark.parametrize(
        "path",
        [
            "/v1/../v1/messages",
            "/v1/%2e%2e/v1/messages",
            "/v1/messages/",
            "/v1/messages/../../etc/passwd",
            "//v1/messages",
            "/v1/messages%00",
            "/v1/messages%ff",
            "/v1/messages;x",
            "/%2fv1%2fmessages",
            "/v2/messages",
            "*",
            "/v1/" + "a" * 5000,
        ],
    )
    def test_nothing_there(self, server: Serving, path: str) -> None:
        answer = send(server, request(path, b"{}", "connection: close"))
        assert answer.startswith(b"HTTP/1.1 404 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"] == "there is no such path"

    @pytest.mark.parametrize("path", PATHS)
    @pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "PATCH"])
    def test_wrong_method(self, server: Serving, method: str, path: str) -> None:
        response = httpx.request(method, server.url + path, headers=AUTH)
        assert (response.status_code, told(response, path)) == (405, "invalid_request_error")

    def test_a_model_named_like_a_path(self, server: Serving) -> None:
        assert httpx.get(f"{server.url}/v1/models/..%2f..%2fetc", headers=AUTH).status_code == 404

    def test_probes(self, server: Serving) -> None:
        assert httpx.head(server.url).status_code == 200
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


class TestTokens:
    @pytest.mark.parametrize("path", [*PATHS, "/v1/messages/count_tokens"])
    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": f"Basic {TOKEN}"},
            {"authorization": "Bearer"},
            {"authorization": f"Bearer {TOKEN} {TOKEN}"},
            {"x-api-key": "../right"},
            {"x-api-key": ""},
        ],
    )
    def test_wrong(self, server: Serving, path: str, headers: dict[str, str]) -> None:
        response = httpx.post(server.url + path, json=VALID[PATHS[0]], headers=headers)
        expected = "authentication_error" if path.startswith("/v1/messages") else "invalid_request_error"
        assert (response.status_code, told(response, path)) == (401, expected)

    def test_models_need_one(self, server: Serving) -> None:
        assert httpx.get(f"{server.url}/v1/models").status_code == 401

    def test_either_header_will_do(self, server: Serving) -> None:
        headers = {"authorization": "Bearer wrong", "x-api-key": TOKEN}
        assert httpx.post(server.url + PATHS[0], json=VALID[PATHS[0]], headers=headers).status_code == 200

    def test_the_body_is_not_read_before(self, server: Serving) -> None:
        """The answer is there while the body is not."""
        head = b"POST /v1/messages HTTP/1.1\r\nhost: tap\r\ncontent-length: 1000\r\n\r\n"
        assert send(server, head).startswith(b"HTTP/1.1 401 ")


class TestHangingUp:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("path", PATHS)
    def test_cancels_the_turn(self, path: str, stream: bool) -> None:
        async def forever(ask: ClientRequest) -> Answer:
            await asyncio.Event().wait()
            raise AssertionError

        with serving(forever, LOW) as server:
            with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
                connection.sendall(request(path, json.dumps(VALID[path] | {"stream": stream}).encode()))
                if stream:  # signs of life have begun
                    assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
                else:
                    assert server.rollout.working.wait(20)
                assert not server.rollout.cancelled.is_set()
            assert server.rollout.cancelled.wait(20)

    def test_cancels_the_turn_also_after_a_stray_byte(self) -> None:
        async def forever(ask: ClientRequest) -> Answer:
            await asyncio.Event().wait()
            raise AssertionError

        with serving(forever, LOW) as server:
            with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
                connection.sendall(request(PATHS[0], json.dumps(VALID[PATHS[0]]).encode()))
                assert server.rollout.working.wait(20)
                connection.sendall(b"\r\n")
                select.select([], [], [], 0.1)
            assert server.rollout.cancelled.wait(20)

    def test_stopping_the_server_tells_those_who_wait(self) -> None:
        async def forever(ask: ClientRequest) -> Answer:
            await asyncio.Event().wait()
            raise AssertionError

        with serving(forever, LOW) as server:
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
            connection.sendall(request(PATHS[0], json.dumps(VALID[PATHS[0]]).encode()))
            assert server.rollout.working.wait(20)
        with connection:
            assert receive(connection).startswith(b"HTTP/1.1 529 ")
        assert server.rollout.cancelled.is_set()


class TestHosts:
    @pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "example.org", ""])
    def test_others_are_refused(self, host: str) -> None:
        with pytest.raises(ListenError, match="other machines"):
            TapServer(Rollouts(), ServerSettings(host=host))

    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
    def test_loopback(self, host: str) -> None:
        with serving(settings=ServerSettings(host=host)) as server:
            assert server.url == f"http://{host}:{server.port}"
            assert httpx.get(f"{server.url}/health").status_code == 200

    def test_public_if_asked_for(self) -> None:
        assert TapServer(Rollouts(), ServerSettings(host="0.0.0.0", public=True)).url == "http://0.0.0.0:0"

    def test_a_port_that_is_taken(self, server: Serving) -> None:
        with pytest.raises(ListenError, match="in use"), serving(settings=ServerSettings(port=server.port)):
            pass
