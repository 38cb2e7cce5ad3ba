"""
The configuration of the router: what can be set, how it is read, what is wrong with it.

Start at `model`, where every setting stands with its reason. `load` reads file, environment and
flags; `verify` looks at the machine (commands, folders, ports); `compare` tells what a reload
changes.
"""

from .changes import Changes, PoolChange, compare, kept, moved
from .loading import from_mapping, load, parse, reload
from .machine import bind_error, find_program, read_secret, verify
from .model import (
    HoldKeepalive,
    KubernetesAccess,
    LogFormat,
    LogLevel,
    Member,
    MemorySettle,
    Pool,
    PoolsFrom,
    Profile,
    SecretSource,
    Settings,
    Upstream,
)
from .problems import ConfigError, Problem
from .source import Source
from .units import Address

__all__ = [
    "Address",
    "Changes",
    "ConfigError",
    "HoldKeepalive",
    "KubernetesAccess",
    "LogFormat",
    "LogLevel",
    "Member",
    "MemorySettle",
    "Pool",
    "PoolChange",
    "PoolsFrom",
    "Problem",
    "Profile",
    "SecretSource",
    "Settings",
    "Source",
    "Upstream",
    "bind_error",
    "compare",
    "find_program",
    "from_mapping",
    "kept",
    "load",
    "moved",
    "parse",
    "read_secret",
    "reload",
    "verify",
]
