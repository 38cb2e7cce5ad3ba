"""
The commands of ``modelpool``. Start at `main`.

Importing a command must stay cheap: what only one command needs (aiohttp, pydantic, rich) is
imported when that command runs, so that ``modelpool --help`` and completion answer at once.
"""
