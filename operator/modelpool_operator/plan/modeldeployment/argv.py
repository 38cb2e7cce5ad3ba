"""
What a command line says about who answers requests in a replica of several members. Tri-state.

An engine with external data-parallel balance has an API server in every rank; any other has one,
in the leader. Read from the command line that a member really runs, because replicas of an older
configuration go on answering in the way they were built for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_SWITCHES = frozenset(
    {
        "--data-parallel-external-lb",
        "-dpe",
        "--data-parallel-hybrid-lb",
        "-dph",
        "--data-parallel-multi-port-external-lb",
    }
)
_WITH_VALUE = frozenset({"--data-parallel-rank", "-dpn", "--dp-rank"})
_RANK_VARIABLES = frozenset({"VLLM_DP_RANK"})
_HIDING = frozenset({"--config"})
"""Flags that take further flags from a file, which nobody here can read."""
_SHELLS = frozenset({"sh", "bash", "ash", "dash"})


def all_answer(container: Mapping[str, Any]) -> bool | None:
    """
    Return whether every member of a replica with this container answers requests.

    None when that cannot be told: the words are made up at run time.
    """
    words = [str(word) for word in (*_words(container, "command"), *_words(container, "args"))]
    names = [word.partition("=")[0] for word in words]
    if any(name in _SWITCHES or name in _WITH_VALUE for name in names):
        return True
    for entry in container.get("env") or []:
        # A value from elsewhere is not known here, and none of the operator's is.
        if entry.get("name") in _RANK_VARIABLES and str(entry.get("value") or "").isdigit():
            return True
    wrapped = bool(words) and words[0].rpartition("/")[2] in _SHELLS
    if wrapped or any(name in _HIDING or "$(" in name for name in names):
        return None
    return False


def _words(container: Mapping[str, Any], key: str) -> Sequence[Any]:
    found = container.get(key)
    return found if isinstance(found, list | tuple) else ()
