"""The guides' programs run as they are printed, with paths of this machine, beside their own plug-ins."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from unit.collection.world import CollectionWorld, collect

GUIDES = Path(__file__).parents[3] / "docs/guides"
ROWS = 12
PROMPTS = {"samples": 2 * ROWS, "samples-asynchronous": ROWS, "samples-rewards": ROWS, "samples-multi-turn": ROWS}
SECONDS = 60.0


def programs(guide: Path) -> dict[str, str]:
    """By file name."""
    return {name: code for name, code in re.findall(r"^```python (\w+\.py)\n(.*?)^```", guide.read_text(), re.M | re.S)}


@pytest.mark.parametrize("name", PROMPTS)
def test_the_program_of_a_guide_trains_every_prompt(tmp_path: Path, name: str) -> None:
    async def story(world: CollectionWorld) -> None:
        rows = world.data(ROWS)
        code = tmp_path / "code"
        code.mkdir()
        for file, text in programs(GUIDES / f"{name}.md").items():
            text = text.replace("/data/train.jsonl", str(rows)).replace("/runs/code", str(code))
            text = text.replace("/runs/", f"{tmp_path}/")
            (code / file).write_text(f"{text}\nfleet.close()\n" if file == "train.py" else text)
        async with AsyncExitStack() as stack:
            url = await world.serve(stack)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, str(code / "train.py")),
                env={"ROLLOUTFLEET_AGENT_URL": url, "PYTHONPATH": ":".join(sys.path)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            said, _ = await process.communicate()
            assert process.returncode == 0, said.decode()
            view = await world.collections.current.view()
        dropped = {"too_easy": ROWS // 4} if name == "samples-rewards" else {}
        assert (view.trained, view.dropped) == (PROMPTS[name] - sum(dropped.values()), dropped)
        assert view.state == "Exhausted"

    collect(tmp_path, story, seconds=SECONDS)
