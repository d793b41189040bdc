"""What SDCC's schedule has come to, from one job to the next.

slime's checkpoints hold nothing of a plugin's. So the state that an iteration begins with is a line in a file beside
them, and a job that goes on finds the line of the iteration it goes on with: guard rails that switched the KL off keep
it off, and the ramp goes on as it began.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_plugin.megatron.objective import SdccSchedule

NAME = "sdcc.jsonl"


@dataclass
class ScheduleMemory:
    """Every rank reads it, one writes it."""

    path: Path
    writes: bool
    fresh: bool = True
    """Nothing has been read yet in this process."""

    def begin(self, iteration: int, schedule: SdccSchedule) -> None:
        """Before the first step of an iteration."""
        if self.fresh:
            self.fresh = False
            found = self._read(iteration)
            if found is not None:
                schedule.restore(found)
        if self.writes:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                cut_off = file.tell() > 0 and not self.path.read_bytes().endswith(b"\n")
                file.write("\n" * cut_off + json.dumps({"iteration": iteration, **schedule.state()}) + "\n")

    def _read(self, iteration: int) -> dict[str, Any] | None:
        """The last line of that iteration, or of the last one before it: what was interrupted is done again, and a job
        may have ended between two iterations. A line that was cut off is none."""
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return None
        states = []
        for line in lines:
            with contextlib.suppress(ValueError):
                states.append(json.loads(line))
        before = [state for state in states if state["iteration"] <= iteration]
        return max(reversed(before), key=lambda state: int(state["iteration"]), default=None)
