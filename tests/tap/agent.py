"""An agent in one file, without any package: what a black box looks like from inside.

It asks the policy, runs ``upper`` for every call, and forgets everything but its task after FORGET turns. What it is
told on the command line is what tests want of it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from typing import Any


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": "upper", "parameters": {"type": "object"}}}]
    body = json.dumps({"model": "policy", "messages": messages, "tools": tools}).encode()
    headers = {"Authorization": f"Bearer {os.environ['TOKEN']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['URL']}/v1/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        choice: dict[str, Any] = json.loads(answer.read())["choices"][0]
        return choice


def main(turns: int, forget: int) -> None:
    task = sys.stdin.read()
    messages: list[dict[str, Any]] = [{"role": "user", "content": task}]
    said: dict[str, Any] = {}
    for turn in range(turns):
        if turn == forget:
            messages = [messages[0], {"role": "user", "content": "You have been at it for a while."}, *messages[-2:]]
        choice = ask(messages)
        said = choice["message"]
        messages.append({"role": "assistant", "content": said["content"], "tool_calls": said.get("tool_calls")})
        for call in said.get("tool_calls") or ():
            result = call["function"]["arguments"].upper()
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if os.environ.get("STRICT") and choice["finish_reason"] == "length":
            sys.exit("the answer was cut off")
        if not said.get("tool_calls"):
            messages.append({"role": "user", "content": f"Go on {turn}."})
    print(said["content"])


if __name__ == "__main__":
    if os.environ.get("HANG"):
        time.sleep(1000)
    main(int(os.environ["TURNS"]), int(os.environ["FORGET"]))
