"""``python -m modelpool_operator`` and the command ``modelpool-operator``."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the operator until TERM or INT."""
    from .settings import read

    settings = read(sys.argv[1:], os.environ)
    # Late: --help and a wrong flag need none of it.
    import asyncio
    from contextlib import suppress

    from .app import run

    try:
        import uvloop
    except ImportError:  # not there on some platforms; the standard loop does it as well
        factory = None
    else:
        factory = uvloop.new_event_loop
    with suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=factory) as runner:
        sys.exit(runner.run(run(settings)))


if __name__ == "__main__":
    main()
