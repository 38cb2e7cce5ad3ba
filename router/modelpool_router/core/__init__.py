"""
Decisions of the router, as pure Python: no I/O, no clock, no logger, no asyncio.

Events go in, commands come out, ``now`` is an argument. ``runtime`` carries the commands out.
"""
