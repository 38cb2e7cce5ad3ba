"""``python -m modelpool_router`` and the command ``modelpool``."""

from __future__ import annotations

from .cli.main import main

if __name__ == "__main__":
    main()
