"""The program: `pyllm`, or `python -m pyllm`.

It sees to what surrounds the commands. Ctrl-C ends the program without a word also while modules are imported and at
exit, when nobody could catch a KeyboardInterrupt. Streams that are closed or full are met with one line.
"""

from __future__ import annotations

import os
import signal
import sys

_INTERRUPTED = 130  # as in pyllm.commands, which is not imported yet when it is needed


def main() -> None:
    """Run the command line, and exit."""
    interruptible = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN  # ignored: started by nohup and the like
    _exit_on_ctrl_c(interruptible)
    from pyllm.commands import main as command_line
    from pyllm.commands import streams

    status: str | int | None = _INTERRUPTED
    try:
        streams.prepare()
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        command_line()
    except SystemExit as end:
        status = end.code
    except KeyboardInterrupt:
        pass
    finally:
        _exit_on_ctrl_c(interruptible)
    sys.exit(streams.finish(status))


def _exit_on_ctrl_c(interruptible: bool) -> None:
    if interruptible:
        signal.signal(signal.SIGINT, lambda signum, frame: os._exit(_INTERRUPTED))


if __name__ == "__main__":
    main()
