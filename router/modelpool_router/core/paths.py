"""
The paths of the data port: what each wants of a body and whose client speaks there.

Exact names only. A path that is not listed does not exist, so nothing of a request's target ever
reaches a member except on the opt-in passthrough.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Literal

Dialect = Literal["openai-chat", "responses", "anthropic", "other"]
"""Whose events a stream on this path carries."""


class Kind(Enum):
    """What a path is for."""

    INFERENCE = auto()
    MODELS = auto()
    MODEL = auto()
    HEALTH = auto()
    PASSTHROUGH = auto()


@dataclass(frozen=True, slots=True)
class PathRule:
    """One path of the data port."""

    kind: Kind
    methods: tuple[str, ...]
    upstream: str = ""
    """Path on the member; a constant of ours."""
    dialect: Dialect = "other"
    model_required: bool = True
    argument: str = ""
    """What the path names: a model id, or the rest behind ``/upstream/``."""

    @property
    def may_stream(self) -> bool:
        """Whether ``"stream": true`` means an event stream here; elsewhere engines ignore it."""
        return self.upstream in _STREAMING


_STREAMING: Final = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/completion",
        "/infill",
    }
)


def _inference(path: str, dialect: Dialect = "other", *, model_required: bool = True) -> PathRule:
    return PathRule(Kind.INFERENCE, ("POST",), path, dialect, model_required)


_HEALTH: Final = PathRule(Kind.HEALTH, ("GET", "HEAD"))

_EXACT: Final[dict[str, PathRule]] = {
    "/v1/chat/completions": _inference("/v1/chat/completions", "openai-chat"),
    "/v1/completions": _inference("/v1/completions"),
    "/v1/embeddings": _inference("/v1/embeddings"),
    "/v1/responses": _inference("/v1/responses", "responses"),
    "/v1/messages": _inference("/v1/messages", "anthropic"),
    "/v1/messages/count_tokens": _inference("/v1/messages/count_tokens", "anthropic"),
    "/v1/rerank": _inference("/v1/rerank"),
    "/v1/reranking": _inference("/v1/reranking"),
    "/rerank": _inference("/rerank"),
    "/completion": _inference("/completion", model_required=False),
    "/infill": _inference("/infill", model_required=False),
    "/tokenize": _inference("/tokenize", model_required=False),
    "/v1/models": PathRule(Kind.MODELS, ("GET", "HEAD")),
    "/livez": _HEALTH,
    "/readyz": _HEALTH,
    "/healthz": _HEALTH,
    "/health": _HEALTH,
}

_FAMILIES: Final = re.compile(r"/v1/(audio|images)/[a-z_]{1,32}")
_MODEL_PREFIX: Final = "/v1/models/"
_UPSTREAM_PREFIX: Final = "/upstream/"


def is_exact(path: str) -> bool:
    """Tell whether *path* names one of the fixed paths to the letter."""
    return path in _EXACT


def find_path(path: str) -> PathRule | None:
    """Return the rule for *path* (see `target`: checked, still percent-encoded), or None."""
    rule = _EXACT.get(path)
    if rule is not None:
        return rule
    if path.startswith(_UPSTREAM_PREFIX):
        methods = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
        rest = path[len(_UPSTREAM_PREFIX) :]
        return PathRule(Kind.PASSTHROUGH, methods, argument=rest)
    if _FAMILIES.fullmatch(path):
        return _inference(path)
    if path.startswith(_MODEL_PREFIX) and len(path) > len(_MODEL_PREFIX):
        return PathRule(Kind.MODEL, ("GET", "HEAD"), argument=path[len(_MODEL_PREFIX) :])
    return None
