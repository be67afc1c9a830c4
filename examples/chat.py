#!/usr/bin/env python3
"""A conversation: each line that you type is answered. An empty line ends it.

python examples/chat.py [MODEL]
"""

import sys

from pyllm import LLM, SamplingParams
from pyllm.hub import pull


def main() -> None:
    with LLM(sys.argv[1] if len(sys.argv) > 1 else pull("demo")) as llm:
        messages: list[dict[str, str]] = []
        while question := read_line():
            messages.append({"role": "user", "content": question})
            answer = ""
            for chunk in llm.chat(messages, SamplingParams(max_tokens=200, seed=1)):
                print(chunk.text, end="", flush=True)
                answer += chunk.text
            print()
            messages.append({"role": "assistant", "content": answer})


def read_line() -> str:
    try:
        return input("> ")
    except EOFError:
        return ""


if __name__ == "__main__":
    main()
