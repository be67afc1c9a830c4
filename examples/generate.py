#!/usr/bin/env python3
"""Continue a text, token by token.

python examples/generate.py [MODEL [TEXT]]
"""

import sys

from pyllm import LLM, SamplingParams
from pyllm.hub import pull


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else pull("demo")
    text = sys.argv[2] if len(sys.argv) > 2 else "The three largest cities of Japan are"
    with LLM(model) as llm:
        print(text, end="")
        for chunk in llm.generate(text, SamplingParams(max_tokens=40, temperature=0)):
            print(chunk.text, end="", flush=True)
        print()
        print(f"{llm.stats['generated_tokens']} tokens in {llm.stats['decode_seconds']:.2f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
