"""Command line of pyllm."""


def main() -> None:
    raise SystemExit("pyllm: no commands yet")
