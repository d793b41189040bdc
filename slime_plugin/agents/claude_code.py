"""The driver of Claude Code, which is configured by its environment.

It compacts once the tokens reported for a turn, with its own estimate of what was added since, reach the configured
context minus the room for an answer (at most 20000 tokens) and 13000; in its first turn, minus 3000. This holds for
models whose name it does not know. It exits after three compactions in quick succession.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from slime_plugin.agents.driver import AgentTask, Driver, Finished, Launch, compaction_point
from slime_plugin.config.harness import ClaudeCode
from slime_plugin.tap.payload import Purpose, Thread

MARGIN_TOKENS = 13000
"""Kept free beside the answer."""
MIN_MARGIN_TOKENS = 3000
"""For the request of a summary, and for errors of its estimate."""
MAX_ANSWER_TOKENS = 20000
"""Kept free for an answer at most."""
MIN_CONTEXT_TOKENS = 10000
"""Before it compacts: its prompt and tools take 4500 of them, the rest a summary and turns."""
DAY_MS = "86400000"
SESSION_HEADER, AGENT_HEADER = "x-claude-code-session-id", "x-claude-code-agent-id"
CLASS_HEADER = "x-claude-code-request-class"
PURPOSES: dict[str, Purpose] = {"compaction": "summary", "auxiliary": "auxiliary", "side_reply": "auxiliary"}
"""By request class; requests of other classes are turns of a conversation."""
SETTINGS = {"attribution": {"commit": "", "pr": ""}}  # otherwise a reminder about commits precedes the task


class ClaudeCodeDriver(Driver[ClaudeCode]):
    Settings = ClaudeCode
    command = "claude"
    verified = "2.1.325"
    client_env = {  # noqa: RUF012
        "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
        "CLAUDE_CODE_GATEWAY_HINT_HEADERS": "1",  # sends CLASS_HEADER
    }

    def prepare(self, task: AgentTask, home: Path, work: Path) -> Launch:
        answer = min(task.turn_tokens, MAX_ANSWER_TOKENS)
        compact_at = compaction_point(
            "claude",
            self.settings.compact_at,
            task,
            free=answer + MARGIN_TOKENS,
            least=answer + MIN_MARGIN_TOKENS,
            room=MIN_CONTEXT_TOKENS,
        )
        folder = home / ".claude"
        folder.mkdir(exist_ok=True)
        (folder / "settings.json").write_text(json.dumps(SETTINGS), encoding="utf-8")
        tools = ",".join(self.settings.tools)
        env = {
            **self.environment(home),
            **self.client_env,
            "ANTHROPIC_BASE_URL": task.url,
            "ANTHROPIC_AUTH_TOKEN": task.token,
            "ANTHROPIC_MODEL": task.model,
            "ANTHROPIC_SMALL_FAST_MODEL": task.model,
            "CLAUDE_CODE_SUBAGENT_MODEL": task.model,
            **{f"ANTHROPIC_DEFAULT_{size}_MODEL": task.model for size in ("HAIKU", "SONNET", "OPUS")},
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(compact_at + answer + MARGIN_TOKENS),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(task.turn_tokens),
            "CLAUDE_CODE_MAX_RETRIES": "3",  # it also retries what cannot succeed, 10 times over three minutes
            "API_TIMEOUT_MS": DAY_MS,  # rollouts have a time limit of their own
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": DAY_MS,
            "CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "DISABLE_AUTOUPDATER": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # a suffix in the prompt that changes with a compaction
            "ENABLE_TOOL_SEARCH": "false",  # it inserts tools in the middle of the list
            "CLAUDE_CODE_DISABLE_AUTO_MEMORY": "1",
            "CLAUDE_CODE_DISABLE_GIT_INSTRUCTIONS": "1",  # with them, the state of a repository is in the prompt
            **({} if self.settings.background else {"CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1"}),
        }
        argv = (
            *(str(self.program()), "--print", "--output-format", "json", "--model", task.model),
            # Refuse what is not allowed instead of asking. Root may not skip the checks altogether.
            *("--permission-mode", "dontAsk", "--tools", tools, "--allowedTools", tools),
            *("--max-turns", str(task.turns), "--strict-mcp-config"),
        )
        return Launch(argv, env, self.request(task))

    @classmethod
    def thread_of(cls, headers: Mapping[str, str]) -> Thread:
        """Agents share the session, and are started by its main conversation."""
        session, agent = headers.get(SESSION_HEADER, ""), headers.get(AGENT_HEADER, "")
        purpose = PURPOSES.get(headers.get(CLASS_HEADER, ""), "")
        return Thread(f"{session}/{agent}", session, purpose) if agent else Thread(session, None, purpose)

    def judge(self, code: int, stdout: str, stderr: str) -> Finished:
        try:
            result = json.loads(stdout)
            ended, output = str(result["terminal_reason"]), str(result.get("result") or "")
        except (ValueError, KeyError, TypeError):
            return super().judge(code, stdout, stderr)
        if code == 0:
            return Finished("completed", code, "", output)
        reason = self.failure_reason(code, f"{ended}: {output or '; '.join(result.get('errors', ()))}")
        return Finished("truncated" if ended == "max_turns" else "failed", code, reason, output)


DRIVER = ClaudeCodeDriver
