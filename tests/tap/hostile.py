"""Valid requests to spoil, raw bytes on a socket, and what an error has to look like."""

from __future__ import annotations

import socket
from typing import Any

import httpx

from slime_plugin.tap.limits import ServerSettings
from tests.tap.http import TOKEN, Serving

PATHS = ("/v1/messages", "/v1/chat/completions", "/v1/responses")
AUTH = {"authorization": f"Bearer {TOKEN}"}
LOW = ServerSettings(
    max_body_bytes=2**20,
    max_head_bytes=2**14,
    max_connections=40,
    head_timeout_s=0.3,
    body_timeout_s=0.3,
    discard_timeout_s=0.3,
    heartbeat_s=0.05,
)
USE = {"type": "tool_use", "id": "c", "name": "ls", "input": {"a": [1]}}
CALL = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": '{"a": [1]}'}}
VALID: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "x"}, USE]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r", "is_error": True}],
            },
        ],
        "tools": [{"name": "ls", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "output_config": {"effort": "high"},
        "stream": False,
    },
    "/v1/chat/completions": {
        "model": "m",
        "max_tokens": 9,
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "reasoning_content": "t", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "r"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "ls", "description": "d", "parameters": {"type": "object"}}}
        ],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "stream": False,
        "stream_options": {"include_usage": True},
    },
    "/v1/responses": {
        "model": "m",
        "max_output_tokens": 9,
        "instructions": "s",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "rs_x", "summary": [{"type": "summary_text", "text": "t"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            {"type": "function_call", "id": "fc_x_0", "call_id": "c", "name": "ls", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
        ],
        "tools": [{"type": "function", "name": "ls", "parameters": {"type": "object"}}],
        "text": {"format": {"type": "text"}},
        "include": ["reasoning.encrypted_content"],
        "stream": False,
    },
}


def check_served(server: Serving) -> None:
    """Another client is served as if nothing had happened."""
    with httpx.Client(base_url=server.url) as client:
        for path in PATHS:
            assert client.post(path, json=VALID[path], headers=AUTH).status_code == 200


def told(response: httpx.Response, path: str) -> str:
    """The type of a provider-style error."""
    body = response.json()
    assert isinstance(body["error"]["message"], str)
    if path.startswith("/v1/messages"):
        assert body["type"] == "error"
        assert body["request_id"] == response.headers["request-id"]
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert response.headers["x-request-id"].startswith("req_")
    return str(body["error"]["type"])


def send(server: Serving, data: bytes, *, half_close: bool = False) -> bytes:
    """Bytes on a connection of their own, and all that comes back until the server hangs up."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(data)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        return receive(connection)


def receive(connection: socket.socket) -> bytes:
    answer = b""
    try:
        while chunk := connection.recv(65536):
            answer += chunk
    except ConnectionResetError:
        pass
    return answer


def request(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: tap", f"authorization: Bearer {TOKEN}", *headers]
    if not any(header.startswith(("content-length", "transfer-encoding")) for header in headers):
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body
