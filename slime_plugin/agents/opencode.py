"""The driver of OpenCode, which is configured by a file in its home.

It compacts once the tokens reported for a turn, prompt and answer, reach the configured input limit. Its step limit
only asks the policy to stop, so turns are limited by the tap alone.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from slime_plugin.agents.driver import AgentTask, Driver, Finished, Launch, compaction_point
from slime_plugin.config.harness import OpenCode

MIN_CONTEXT_TOKENS = 14000
"""Before it compacts: its prompt and tools take 7000 of them, the rest a summary, recent turns that it keeps, and new
turns. With less it compacts endlessly."""
PLUGINS = {"lockfileVersion": 3, "packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}}


class OpenCodeDriver(Driver[OpenCode]):
    Settings = OpenCode
    command = "opencode"
    verified = "1.18.33"
    inherited_files = (*Driver.inherited_files, "opencode.json", "opencode.jsonc", ".opencode")

    def prepare(self, task: AgentTask, home: Path, work: Path) -> Launch:
        answer, configured = task.turn_tokens, self.settings.compact_at
        compact_at = compaction_point("opencode", configured, task, free=answer, least=answer, room=MIN_CONTEXT_TOKENS)
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
        configuration = json.dumps(self.configuration(task, compact_at), indent=1)
        (folder / "opencode.json").write_text(configuration, encoding="utf-8")
        # With a title given, it does not ask the policy for one.
        argv = (str(self.program()), "run", "--format", "json", "--model", f"tap/{task.model}", "--title", "task")
        return Launch(argv, env, self.request(task))

    def configuration(self, task: AgentTask, compact_at: int) -> dict[str, Any]:
        model = f"tap/{task.model}"
        keep = self.settings.keep_tokens
        limit = {"context": task.context_tokens, "input": compact_at, "output": task.turn_tokens}
        served = {
            "name": task.model,
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
                    # Rollouts have a time limit of their own.
                    "options": {"baseURL": f"{task.url}/v1", "apiKey": task.token, "timeout": False},
                    "models": {task.model: served},
                }
            },
            # The last matching rule counts. Nobody can be asked.
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
        """Judge by the last step: the exit code is 1 even after a context that was too long and then compacted."""
        events = []
        for line in stdout.splitlines():
            with contextlib.suppress(ValueError):  # the last one, if it was killed while it wrote
                events.append(json.loads(line))
        texts = [event["part"] for event in events if event["type"] == "text"]
        output = "".join(part["text"] for part in texts if part["messageID"] == texts[-1]["messageID"])
        last = events[-1] if events else {}
        if last.get("type") == "error":
            error = last["error"].get("data", {}).get("message") or last["error"].get("name")
            return Finished("failed", code, self.failure_reason(code, str(error)), output)
        if last.get("type") != "step_finish" or last["part"]["reason"] == "tool-calls":
            return Finished("failed", code, self.failure_reason(code, stderr.strip()), output)
        return Finished("completed", code, "", output)


DRIVER = OpenCodeDriver
