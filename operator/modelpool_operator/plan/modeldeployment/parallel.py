"""
How many accelerators a managed command line asks of each member, as far as that is certain.

Only tensor and pipeline parallelism are counted: every engine needs their product for one copy of
the model. What else an engine puts beside it depends on how it was built, so the answer is a lower
bound, and an edit is never refused for a guess.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from modelpool_api.names import REPLICA_SIZE_ENV
from modelpool_api.v1alpha1.modeldeployment import EngineName, ModelDeploymentSpec, Role

from .argv import all_answer

_TENSOR = ("--tensor-parallel-size", "-tp", "--tp-size", "--tp")
_PIPELINE = ("--pipeline-parallel-size", "-pp", "--pp-size", "--pp")
_ENGINES = frozenset({EngineName.VLLM, EngineName.SGLANG})
_VARIABLE = re.compile(r"\$\(([^()]+)\)")
_DEGREE = re.compile("[1-9][0-9]{0,5}")


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A degree that is no number."""

    flag: str
    value: str


@dataclass(frozen=True, slots=True)
class Degrees:
    """The parallel degrees of a command line."""

    tensor: int = 1
    pipeline: int = 1
    is_whole: bool = False
    """Whether each member runs a whole copy of the model, and not a share of one."""

    def width(self, size: int) -> int:
        """Return the accelerators that each of *size* members needs at least."""
        world = self.tensor * self.pipeline
        return world if self.is_whole else -(-world // size)

    def __str__(self) -> str:
        where = " in every member" if self.is_whole else ""
        return f"tensor {self.tensor} x pipeline {self.pipeline}{where}"


def degrees(spec: ModelDeploymentSpec, role: Role) -> Degrees | Unreadable | None:
    """
    Return what the arguments of *role* say; None when nobody here knows how to read them.

    `$(NAME)` stands for a variable of the role, as in Kubernetes; the size of a replica is one
    where there are several members.
    """
    if role.command or spec.engine.name not in _ENGINES:
        return None
    values = {each.name: each.value for each in role.env}
    if role.size > 1:
        values[REPLICA_SIZE_ENV] = str(role.size)
    found = []
    for flags in (_TENSOR, _PIPELINE):
        flag, text = _last(role.extra_args, flags)
        meant = _VARIABLE.sub(lambda match: values.get(match[1], match[0]), text)
        if _DEGREE.fullmatch(meant) is None:
            return Unreadable(flag, text)
        found.append(int(meant))
    env = [{"name": each.name, "value": each.value} for each in role.env]
    is_whole = all_answer({"args": role.extra_args, "env": env}) is True
    return Degrees(found[0], found[1], is_whole)


def _last(words: tuple[str, ...], flags: tuple[str, ...]) -> tuple[str, str]:
    """Return the last of *flags* in *words*, and its value; the value is 1 without any."""
    flag, value = flags[0], "1"
    for at, word in enumerate(words):
        name, split, text = word.partition("=")
        # Engines take underscores for dashes.
        if name.replace("_", "-") in flags:
            flag = name
            value = text if split else "".join(words[at + 1 : at + 2])
    return flag, value
