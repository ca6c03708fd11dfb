"""The Claude Agent SDK as its documentation shows it: built-in tools and one of its own. Argument: the task."""

import asyncio
import os
import sys
from typing import Any

from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, create_sdk_mcp_server, query, tool


@tool("greet", "Greets somebody", {"name": str})
async def greet(given: dict[str, Any]) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": f"Hello, {given['name']}!"}, {"type": "text", "text": "Bye."}]}


async def main(task: str) -> None:
    names = ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY")
    options = ClaudeAgentOptions(
        model="policy", env={name: os.environ[name] for name in names}, setting_sources=[],
        system_prompt="You work in the current directory.",
        mcp_servers={"own": create_sdk_mcp_server("own", tools=[greet])},
        allowed_tools=["Write", "Bash", "Read", "mcp__own__greet"])
    async for message in query(prompt=task, options=options):
        if isinstance(message, ResultMessage):
            print(message.result)


asyncio.run(main(sys.argv[1]))
