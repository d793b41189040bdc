"""OpenCode. Configured by a file in its home.

It compacts once the tokens that we report for a turn, prompt and answer, reach the input limit that we give it. Its own
limit on steps is none: it asks the policy to stop, and goes on if that does not. So turns are limited by the tap alone.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from slime_plugin.config.harness import OpenCode
from slime_plugin.tap.drivers.base import Driver, Errand, Finished, Launch, compaction_point

ROOM = 14000
"""Tokens that have to fit before it compacts: its prompt and tools take 7000 of them, the rest a summary, what it
leaves as it is, and turns. With less it compacts for ever."""
PLUGINS = {"lockfileVersion": 3, "packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}}


class OpenCodeDriver(Driver[OpenCode]):
    Settings = OpenCode
    command = "opencode"
    verified = "1.18.33"

    def prepare(self, errand: Errand, home: Path, work: Path) -> Launch:
        answer, asked = errand.turn_tokens, self.settings.compact_at
        compact_at = compaction_point("opencode", asked, errand, free=answer, least=answer, room=ROOM)
        env = {
            **self.environment(home),
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
            "OPENCODE_DISABLE_SHARE": "1",
            "OPENCODE_PURE": "1",
            "OPENCODE_DISABLE_EXTERNAL_SKILLS": "1",
            "OPENCODE_DISABLE_CLAUDE_CODE": "1",
        }
        folder = home / ".config" / "opencode"
        (folder / "node_modules").mkdir(parents=True, exist_ok=True)
        # It would install its plugin interface from the network. With a lock file it takes it as installed.
        (folder / "package-lock.json").write_text(json.dumps(PLUGINS), encoding="utf-8")
        configuration = json.dumps(self.configuration(errand, compact_at), indent=1)
        (folder / "opencode.json").write_text(configuration, encoding="utf-8")
        # With a title it does not ask the policy for one.
        argv = (str(self.program()), "run", "--format", "json", "--model", f"tap/{errand.model}", "--title", "task")
        return Launch(argv, env, self.request(errand))

    def configuration(self, errand: Errand, compact_at: int) -> dict[str, Any]:
        model = f"tap/{errand.model}"
        keep = self.settings.keep_tokens
        limit = {"context": errand.context_tokens, "input": compact_at, "output": errand.turn_tokens}
        served = {
            "name": errand.model,
            "limit": limit,
            "tool_call": True,
            "reasoning": True,
            "interleaved": {"field": "reasoning_content"},
        }
        return {
            "model": model,
            "small_model": model,
            "enabled_providers": ["tap"],
            "provider": {
                "tap": {
                    "npm": "@ai-sdk/openai-compatible",
                    # The limit on a rollout is ours.
                    "options": {"baseURL": f"{errand.url}/v1", "apiKey": errand.token, "timeout": False},
                    "models": {errand.model: served},
                }
            },
            # The last rule that fits counts. Nobody is there to be asked.
            "permission": {"*": "deny"}
            | dict.fromkeys((*self.settings.tools, "external_directory", "doom_loop"), "allow"),
            "compaction": {"auto": True, "reserved": 0, "prune": self.settings.prune}
            | ({} if keep is None else {"preserve_recent_tokens": keep}),
            "share": "disabled",
            "autoupdate": False,
            "snapshot": False,
            "lsp": False,
            "formatter": False,
        }

    def judge(self, code: int, stdout: str, stderr: str) -> Finished:
        """By its last step: it exits with 1 also if a context was too long, although it compacted and went on."""
        events = []
        for line in stdout.splitlines():
            with contextlib.suppress(ValueError):  # the last one, if it was killed while it wrote
                events.append(json.loads(line))
        texts = [event["part"] for event in events if event["type"] == "text"]
        output = "".join(part["text"] for part in texts if part["messageID"] == texts[-1]["messageID"])
        last = events[-1] if events else {}
        if last.get("type") == "error":
            error = last["error"].get("data", {}).get("message") or last["error"].get("name")
            return Finished("failed", code, self.complaint(code, str(error)), output)
        if last.get("type") != "step_finish" or last["part"]["reason"] == "tool-calls":
            return Finished("failed", code, self.complaint(code, stderr.strip()), output)
        return Finished("completed", code, "", output)
