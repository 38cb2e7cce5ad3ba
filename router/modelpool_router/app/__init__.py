"""
The composition root: settings in, a running router out. The only place that knows every part.

`assembly` turns settings into values of the parts, `router` wires the parts and owns their lives,
`serving` adds what a process needs: signals, reload, exit code.
"""

from .router import Addresses, Router
from .serving import run

__all__ = ["Addresses", "Router", "run"]
