#!/usr/bin/env python3
"""A job of many questions that may be ended at any time and goes on when it is run again.

python examples/resumable_job.py [MODEL [FOLDER]]

It writes questions.jsonl into FOLDER (default: the current one) and answers them into answers.jsonl beside it. Here the
job is ended on purpose as soon as a few answers are there, and begun again.
"""

import json
import subprocess
import sys
from pathlib import Path

ENDED = (0, 3, 143)  # all answered; some failed; ended by SIGTERM


def write_questions(path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for a in range(2, 6):
            for b in range(2, 6):
                line = {"id": f"{a}x{b}", "prompt": f"What is {a} times {b}?", "max_tokens": 12 * a, "temperature": 0}
                print(json.dumps(line), file=file)


def run(batch: list[str], enough: float = float("inf")) -> int:
    """Runs the job; ends it once so many lines are answered. Returns the exit status."""
    with subprocess.Popen([*batch, "--progress", "json"], stderr=subprocess.PIPE, encoding="utf-8") as process:
        assert process.stderr is not None
        for text in process.stderr:
            if not text.startswith("{"):  # warnings, and why it cannot be done
                print(text, end="", file=sys.stderr)
                continue
            event = json.loads(text)
            print(f"{event['event']}: {event['done']} of {event['total']} lines")
            if event["event"] == "progress" and event["done"] >= enough:
                process.terminate()
    return process.returncode


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    folder = Path(sys.argv[2] if len(sys.argv) > 2 else ".")
    questions, answers = folder / "questions.jsonl", folder / "answers.jsonl"
    write_questions(questions)
    batch = [sys.executable, "-m", "pyllm", "batch", model, str(questions), "-o", str(answers), "--parallel", "2"]
    for enough in (1, float("inf")):
        if (status := run(batch, enough)) not in ENDED:
            sys.exit(status)
    with answers.open(encoding="utf-8") as records:
        for record in map(json.loads, records):
            print(record["id"], json.dumps(record["text"]))


if __name__ == "__main__":
    main()
