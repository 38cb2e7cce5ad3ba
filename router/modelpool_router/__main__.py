"""``python -m modelpool_router`` and the command ``modelpool``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run what the command line asks for; the most frequent thing does without the rest of it."""
    from .cli.starting import serve_at_once

    try:
        code = serve_at_once(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
    if code is not None:
        sys.exit(code)
    from .cli.main import main as any_command

    any_command()


if __name__ == "__main__":
    main()
