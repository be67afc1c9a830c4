#!/usr/bin/env python3
"""Summarise each text file of a folder. Ended by Ctrl-C, it goes on when it is run again.

python examples/summarise_folder.py MODEL FOLDER [OUT]
"""

import json
import subprocess
import sys

TEMPLATE = r"Summarise this text in one sentence.\n\n{text}"


def main() -> None:
    model, folder = sys.argv[1:3]
    out = sys.argv[3] if len(sys.argv) > 3 else "summaries.jsonl"
    batch = [sys.executable, "-m", "pyllm", "batch", model, folder, "-o", out]
    status = subprocess.run([*batch, "--template", TEMPLATE, "-n", "60", "--temp", "0"]).returncode
    if status not in (0, 3):  # 3: some files could not be answered, and their records say why
        sys.exit(status)
    with open(out, encoding="utf-8") as records:
        for record in sorted(map(json.loads, records), key=lambda record: record["line"]):
            error = record["error"]
            print(f"{record['id']}: {error['message'] if error else ' '.join(record['text'].split())}")


if __name__ == "__main__":
    main()
