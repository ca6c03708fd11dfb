"""The OpenAI Agents SDK as its documentation shows it.

Arguments: chat_completions | responses, plain | stream, the task.
"""

import asyncio
import subprocess
import sys
from pathlib import Path

from agents import Agent, Runner, function_tool, set_default_openai_api


@function_tool
def write_file(path: str, content: str) -> str:
    """Writes a file."""
    Path(path).write_text(content)
    return "written"


@function_tool
def shell(command: str) -> str:
    """Runs a command and returns its output."""
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


async def main(api: str, how: str, task: str) -> None:
    set_default_openai_api(api)
    agent = Agent("worker", instructions="You work in this directory.", model="policy", tools=[write_file, shell])
    if how == "plain":
        result = await Runner.run(agent, task)
    else:
        result = Runner.run_streamed(agent, task)
        async for _ in result.stream_events():
            pass
    print(result.final_output)


asyncio.run(main(*sys.argv[1:]))
