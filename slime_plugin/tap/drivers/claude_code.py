"""Claude Code. Configured by environment.

It compacts once the tokens that we report for a turn, and its own guess for what has been added since, reach the
context that it was told of less the room for an answer (at most 20000 tokens) and 13000; in its first turn, less 3000.
This holds for models whose name it does not know. Three compactions with hardly a turn between them end it.
"""

from __future__ import annotations

import json
from pathlib import Path

from slime_plugin.config.harness import ClaudeCode
from slime_plugin.tap.drivers.base import Driver, Errand, Finished, Launch, compaction_point

MARGIN = 13000
"""Tokens that it keeps free beside the answer."""
LEAST = 3000
"""How many of these it takes to ask for a summary, and to guess wrongly."""
MOST_RESERVED = 20000
"""Tokens of an answer that it keeps free at most."""
ROOM = 10000
"""Tokens that have to fit before it compacts: its prompt and tools take 4500 of them, the rest a summary and turns."""
DAY = "86400000"
"""In milliseconds."""
SETTINGS = {"attribution": {"commit": "", "pr": ""}}  # otherwise a reminder about commits precedes the task


class ClaudeCodeDriver(Driver[ClaudeCode]):
    Settings = ClaudeCode
    command = "claude"
    verified = "2.1.325"

    def prepare(self, errand: Errand, home: Path, work: Path) -> Launch:
        answer = min(errand.turn_tokens, MOST_RESERVED)
        asked = self.settings.compact_at
        compact_at = compaction_point("claude", asked, errand, free=answer + MARGIN, least=answer + LEAST, room=ROOM)
        folder = home / ".claude"
        folder.mkdir(exist_ok=True)
        (folder / "settings.json").write_text(json.dumps(SETTINGS), encoding="utf-8")
        tools = ",".join(self.settings.tools)
        env = {
            **self.environment(home),
            "ANTHROPIC_BASE_URL": errand.url,
            "ANTHROPIC_AUTH_TOKEN": errand.token,
            "ANTHROPIC_MODEL": errand.model,
            "ANTHROPIC_SMALL_FAST_MODEL": errand.model,
            "CLAUDE_CODE_SUBAGENT_MODEL": errand.model,
            **{f"ANTHROPIC_DEFAULT_{size}_MODEL": errand.model for size in ("HAIKU", "SONNET", "OPUS")},
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(compact_at + answer + MARGIN),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(errand.turn_tokens),
            "CLAUDE_CODE_MAX_RETRIES": "3",  # it also retries what cannot succeed, 10 times over three minutes
            "API_TIMEOUT_MS": DAY,  # the limit on a rollout is ours
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": DAY,
            "CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK": "1",
            "CLAUDE_CODE_GATEWAY_HINT_HEADERS": "1",  # each request says what it is for
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "DISABLE_AUTOUPDATER": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # a suffix in the prompt that changes with a compaction
            "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
            "ENABLE_TOOL_SEARCH": "false",  # it puts tools into the middle of the list
            "CLAUDE_CODE_DISABLE_AUTO_MEMORY": "1",
            "CLAUDE_CODE_DISABLE_GIT_INSTRUCTIONS": "1",  # with them, the state of a repository is in the prompt
            **({} if self.settings.background else {"CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1"}),
        }
        argv = (
            *(str(self.program()), "--print", "--output-format", "json", "--model", errand.model),
            # What is not allowed is refused, and nobody is asked. Skipping the checks altogether is refused to root.
            *("--permission-mode", "dontAsk", "--tools", tools, "--allowedTools", tools),
            *("--max-turns", str(errand.turns), "--strict-mcp-config"),
        )
        return Launch(argv, env, self.request(errand))

    def judge(self, code: int, stdout: str, stderr: str) -> Finished:
        try:
            result = json.loads(stdout)
            ended, output = str(result["terminal_reason"]), str(result.get("result") or "")
        except (ValueError, KeyError, TypeError):
            return super().judge(code, stdout, stderr)
        if code == 0:
            return Finished("completed", code, "", output)
        reason = self.complaint(code, f"{ended}: {output or '; '.join(result.get('errors', ()))}")
        return Finished("truncated" if ended == "max_turns" else "failed", code, reason, output)
