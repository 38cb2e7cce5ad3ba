"""
Takes the guards of replacing replicas away, one at a time: some scenario must notice each.

    python tests/support/mdep_mutants.py [WORD ...]    # all, or those whose name has a WORD

Prints a table; exit status 1 when a guard was not missed. The rules are those of the behaviour
that `docs/modeldeployment.md` describes; the first column only orders them.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[2]
PLAN = "modelpool_operator/plan/modeldeployment"
ENGINE = "modelpool_operator/engine/modeldeployment.py"
SCENARIOS = "tests/operator/modeldeployment"
SLOW = ("test_crashes.py", "test_walk.py", "test_kueue_standin.py", "test_mutants.py")
LIMIT_S = 240


@dataclass(frozen=True, slots=True)
class Mutant:
    """One guard, and how it is taken away: *old* occurs once in *path* and becomes *new*."""

    rule: str
    guard: str
    path: str
    old: str
    new: str


REPLACEMENT = f"{PLAN}/replacement.py"
ADMISSION = f"{PLAN}/admission.py"
ROLLOUT = f"{PLAN}/rollout.py"

MUTANTS = (
    Mutant(
        "R26",
        "all members are captured",
        REPLACEMENT,
        "uids = {member.uid for member in place.members} | set(more)",
        "uids = {member.uid for member in place.members[:1]} | set(more)",
    ),
    Mutant(
        "R26",
        "members that are going are captured as well",
        REPLACEMENT,
        "uids = {member.uid for member in place.members} | set(more)",
        "uids = {member.uid for member in place.standing} | set(more)",
    ),
    Mutant(
        "R26",
        "the Workload is captured",
        REPLACEMENT,
        "workload_uid=workload.uid if workload is not None else slot.current_workload_uid",
        "workload_uid=slot.current_workload_uid",
    ),
    Mutant(
        "R26",
        "the record is written before anything is done",
        ENGINE,
        "if decided.record is not None:",
        "if decided.record is not None and not decided.actions:",
    ),
    Mutant(
        "R26",
        "a refused record ends the pass",
        ENGINE,
        """            raw = await self._port.patch_merge(
                MODEL_DEPLOYMENTS, *key, decided.record, version=version_of(raw)
            )
""",
        """            try:
                raw = await self._port.patch_merge(
                    MODEL_DEPLOYMENTS, *key, decided.record, version=version_of(raw)
                )
            except Conflict:
                pass
""",
    ),
    Mutant(
        "R26",
        "a replica that was selected stops answering",
        f"{PLAN}/routing.py",
        "            if replica.ordinal in condemned:\n"
        "                found[member.uid] = False\n            elif",
        "            if",
    ),
    Mutant(
        "R27",
        "deletes are for one UID",
        ENGINE,
        "await self._port.delete(kind, namespace, name, uid=its)",
        "await self._port.delete(kind, namespace, name)",
    ),
    Mutant(
        "R27",
        "what is gone already is deleted",
        ENGINE,
        """uid=its)
        except NotFound:
            pass
""",
        """uid=its)
        except NotFound:
            raise
""",
    ),
    Mutant(
        "R27",
        "another one under the name means gone",
        ENGINE,
        "if any(uid(each) == its for each in found.items):",
        "if found.items:",
    ),
    Mutant(
        "R28",
        "what is going is not deleted again",
        REPLACEMENT,
        "if member.uid in captured and not member.is_going",
        "if member.uid in captured",
    ),
    Mutant(
        "R29",
        "the captured Workload is deleted by UID",
        REPLACEMENT,
        "(workload.uid == slot.workload_uid or workload.owns(captured))",
        "workload.owns(captured)",
    ),
    Mutant(
        "R29",
        "a Workload of a captured member is deleted",
        REPLACEMENT,
        "(workload.uid == slot.workload_uid or workload.owns(captured))",
        "workload.uid == slot.workload_uid",
    ),
    Mutant(
        "R29",
        "a name proves nothing",
        REPLACEMENT,
        "(workload.uid == slot.workload_uid or workload.owns(captured))",
        "(workload.uid == slot.workload_uid or workload.stands_on(place.group))",
    ),
    Mutant(
        "R30",
        "the Workload is deleted with no member left",
        REPLACEMENT,
        "        for workload in place.workloads\n        if not workload.is_going and",
        "        for workload in place.workloads if place.members\n"
        "        if not workload.is_going and",
    ),
    Mutant(
        "R31",
        "a pass that deletes does nothing else",
        REPLACEMENT,
        "        if step.actions:\n            return step\n",
        "",
    ),
    Mutant(
        "R32",
        "what is not captured is not deleted",
        REPLACEMENT,
        "if member.uid in captured and not member.is_going",
        "if not member.is_going",
    ),
    Mutant(
        "R32",
        "a stranger holds the place",
        REPLACEMENT,
        "    for member in (*place.members, *place.intruders):\n        return Vacancy(",
        "    for member in place.members:\n        return Vacancy(",
    ),
    Mutant(
        "R34",
        "a member that is going holds the place",
        REPLACEMENT,
        "if member.is_going or member.uid in captured:\n            return Vacancy(False, f",
        "if member.is_going or member.uid in captured:\n            return Vacancy(True, f",
    ),
    Mutant(
        "R34",
        "a Workload that is going holds the place",
        REPLACEMENT,
        "        if not workload.stands_on(place.group):\n            continue\n",
        "        if not workload.stands_on(place.group) or workload.is_going:\n"
        "            continue\n",
    ),
    Mutant(
        "R34",
        "a PodSet of the name holds the place",
        f"{PLAN}/sight.py",
        'return self.name == group or any(each.get("name") == group for each in self.pod_sets)',
        "return self.name == group",
    ),
    Mutant(
        "R35",
        "a foreign Workload holds the place",
        REPLACEMENT,
        "        if not workload.stands_on(place.group):\n            continue\n",
        "        if not workload.stands_on(place.group) or not workload.owners:\n"
        "            continue\n",
    ),
    Mutant(
        "R36",
        "a read of Workloads that failed is no answer",
        ENGINE,
        "        except NotServed:\n            raise KubeError(",
        "        except KubeError:\n            return ()\n            raise KubeError(",
    ),
    Mutant(
        "R36",
        "a read of Pods that failed is no answer",
        ENGINE,
        "        pods = (await self._port.list(PODS, namespace, labels=kueue.GROUP_LABEL)).items\n",
        """        try:
            pods = (await self._port.list(PODS, namespace, labels=kueue.GROUP_LABEL)).items
        except KubeError:
            pods = ()
""",
    ),
    Mutant(
        "R37",
        "what the replica is built from is recorded",
        REPLACEMENT,
        'workload_uid="", member_hashes=hashes)',
        'workload_uid="", member_hashes=())',
    ),
    Mutant(
        "R37",
        "the phase is recorded before the first create",
        REPLACEMENT,
        "slot = replace(slot, phase=SlotPhase.WAITING, since=now)",
        "slot = replace(slot, since=now)",
    ),
    Mutant(
        "R38",
        "missing replicas are made at vacant places",
        ROLLOUT,
        "        free = vacancy(place)\n        if free.is_vacant:",
        "        free = vacancy(place)\n        if free.is_vacant or not place.standing:",
    ),
    Mutant(
        "R39",
        "a create that failed does not stop the others",
        ENGINE,
        "            # Perhaps it was made all the same; only the next look can tell.\n"
        "            return error",
        "            raise error",
    ),
    Mutant(
        "R39",
        "new members are recorded at once",
        REPLACEMENT,
        'notes=(*notes, made), again=True)',
        'notes=(*notes, made), again=False)',
    ),
    Mutant(
        "R40",
        "nothing is made that the count does not ask for",
        REPLACEMENT,
        "cancelled = render is None or slot.ordinal >= count",
        "cancelled = render is None",
    ),
    Mutant(
        "R41",
        "only members of the same total are completed",
        REPLACEMENT,
        "            or member.total != render.size\n",
        "",
    ),
    Mutant(
        "R41",
        "only members of the same configuration are completed",
        REPLACEMENT,
        "            or member.hash != render.hash(member.ordinal, member.index)\n"
        "            or shape",
        "            or shape",
    ),
    Mutant(
        "R41",
        "only members on seats are completed",
        REPLACEMENT,
        "            or member.index is None\n            or member.index >= render.size\n"
        "            or member.total != render.size\n"
        "            or member.hash != render.hash(member.ordinal, member.index)\n"
        "            or shape.verdict is Verdict.UNREADABLE\n",
        "            or member.total != render.size\n",
    ),
    Mutant(
        "R41",
        "nothing is completed once there is a Workload",
        REPLACEMENT,
        "    if held is not None:\n",
        "    if held is not None and held.owners:\n",
    ),
    Mutant(
        "R43",
        "a replica that is short is broken",
        ROLLOUT,
        "return self.shape.verdict is Verdict.INCOMPLETE",
        "return False",
    ),
    Mutant(
        "R44",
        "a new member that is going is a loss",
        REPLACEMENT,
        "    if gone:\n",
        "    if gone and not gone:\n",
    ),
    Mutant(
        "R44",
        "a recorded member that is missing is a loss",
        REPLACEMENT,
        "    if missing:\n",
        "    if missing and not missing:\n",
    ),
    Mutant(
        "R44",
        "a Workload of fewer members is a loss",
        REPLACEMENT,
        "if owning is not None and len(place.members) < render.size:",
        "if owning is not None and len(place.members) < 0:",
    ),
    Mutant(
        "R45",
        "a newer configuration supersedes",
        REPLACEMENT,
        "if slot.member_hashes != render.hashes(slot.ordinal):",
        "if not slot.member_hashes:",
    ),
    Mutant(
        "R46",
        "recorded members are captured",
        REPLACEMENT,
        "_captured(slot, place, slot.current_member_uids)",
        "_captured(slot, place, ())",
    ),
    Mutant(
        "R46",
        "the recorded Workload is captured",
        REPLACEMENT,
        "workload_uid=workload.uid if workload is not None else slot.current_workload_uid",
        'workload_uid=workload.uid if workload is not None else ""',
    ),
    Mutant(
        "R47",
        "new members are recorded",
        REPLACEMENT,
        "        current_member_uids=tuple(sorted(there)),\n",
        "",
    ),
    Mutant(
        "R47",
        "the new Workload is recorded",
        REPLACEMENT,
        "current_workload_uid=owning.uid if owning is not None else slot.current_workload_uid",
        "current_workload_uid=slot.current_workload_uid",
    ),
    Mutant(
        "R48",
        "a place is proven vacant again",
        REPLACEMENT,
        "return _create(slot, place, render, now) if free.is_vacant else _wait(slot, free)",
        "return _create(slot, place, render, now) if free else _wait(slot, free)",
    ),
    Mutant(
        "R49.1",
        "every seat is filled once",
        ADMISSION,
        "    if len(members) != render.size:\n",
        "    if len(members) < render.size:\n",
    ),
    Mutant(
        "R49.1",
        "no two members sit on one seat",
        ADMISSION,
        " or member.index in seats:",
        ":",
    ),
    Mutant(
        "R49.1",
        "no member is going",
        ADMISSION,
        "        if not member.stands:\n",
        "        if not member:\n",
    ),
    Mutant(
        "R49.1",
        "members are of the newest configuration",
        ADMISSION,
        "if member.ordinal is None or member.hash != render.hash(member.ordinal, member.index):",
        "if member.ordinal is None:",
    ),
    Mutant(
        "R49.2",
        "reserved quota is no admission",
        ADMISSION,
        "    if not workload.is_admitted:\n",
        "    if not workload.is_admitted and not workload.has_quota:\n",
    ),
    Mutant(
        "R49.2",
        "the Workload is the one of the group",
        ADMISSION,
        "(each for each in workloads if each.stands_on(render.group(ordinal)))",
        "(each for each in workloads)",
    ),
    Mutant(
        "R49.3",
        "the Workload was made of every member",
        ADMISSION,
        "    if missing:\n",
        "    if len(missing) == len(members):\n",
    ),
    Mutant(
        "R49.4",
        "the PodSets are as many",
        ADMISSION,
        "    if len(workload.pod_sets) != len(groups):\n",
        "    if not workload.pod_sets:\n",
    ),
    Mutant(
        "R49.4",
        "the PodSets are of the members",
        ADMISSION,
        '            return f"Workload {workload.name} has a PodSet {name} of no member"\n',
        "            continue\n",
    ),
    Mutant(
        "R49.4",
        "the PodSets count as many",
        ADMISSION,
        'if pod_set.get("count", 1) != len(group):',
        'if pod_set.get("count", 1) < len(group):',
    ),
    Mutant(
        "R49.5",
        "the template is the members'",
        ADMISSION,
        "if (theirs[name].get(key) or None) != (container.get(key) or None):",
        'if key == "none":',
    ),
    Mutant(
        "R49.5",
        "the containers are the members'",
        ADMISSION,
        "    if theirs.keys() != ours.keys():\n",
        "    if not theirs:\n",
    ),
    Mutant(
        "R49.5",
        "the image is the members'",
        ADMISSION,
        '_COMPARED = ("image", "command", "args", "env")',
        '_COMPARED = ("command", "args", "env")',
    ),
    Mutant(
        "R49.5",
        "the command is the members'",
        ADMISSION,
        '_COMPARED = ("image", "command", "args", "env")',
        '_COMPARED = ("image", "args", "env")',
    ),
    Mutant(
        "R49.5",
        "the args are the members'",
        ADMISSION,
        '_COMPARED = ("image", "command", "args", "env")',
        '_COMPARED = ("image", "command", "env")',
    ),
    Mutant(
        "R49.5",
        "the environment is the members'",
        ADMISSION,
        '_COMPARED = ("image", "command", "args", "env")',
        '_COMPARED = ("image", "command", "args")',
    ),
    Mutant(
        "R49.5",
        "the affinity of the members is kept",
        ADMISSION,
        'if not _within(live.get("affinity") or {}, template.get("affinity") or {}):',
        "if template is live:",
    ),
    Mutant(
        "R49.5",
        "pins of admission hooks are no difference",
        ADMISSION,
        'if not _within(live.get("affinity") or {}, template.get("affinity") or {}):',
        'if live.get("affinity") != template.get("affinity"):',
    ),
    Mutant(
        "R49.6",
        "the requests are equal",
        ADMISSION,
        "if requests(template) != requests(live):",
        "if not requests(template):",
    ),
    Mutant(
        "R49.7",
        "the queue is the rendered one",
        ADMISSION,
        "if workload.queue != render.queue or not workload.queue:",
        "if workload.queue is None:",
    ),
    Mutant(
        "R49.8",
        "an evicted Workload admits nobody",
        ADMISSION,
        'if condition_status(workload.status, kueue.EVICTED) == "True":',
        'if condition_status(workload.status, kueue.EVICTED) == "Maybe":',
    ),
    Mutant(
        "R49.8",
        "a Workload that is going admits nobody",
        ADMISSION,
        "    if workload.is_going:\n",
        "    if workload is None:\n",
    ),
    Mutant(
        "R49.8",
        "an admission says to what",
        ADMISSION,
        'if not workload.status.get("admission"):',
        "if not workload.status:",
    ),
    # Beyond R26-R49: what else keeps a healthy replica
    Mutant(
        "R9",
        "nothing is done for what cannot be built",
        f"{PLAN}/one_pass.py",
        "frozen = (bool(wrong) or unrenderable is not None) and not deployment.spec.suspend",
        "frozen = bool(wrong) and not deployment.spec.suspend",
    ),
    Mutant(
        "R11",
        "a Workload with a standing member is kept",
        f"{PLAN}/one_pass.py",
        "        and not each.owns(standing)\n",
        "",
    ),
    Mutant(
        "R13",
        "a pass that sheds selects nobody",
        ROLLOUT,
        "may_select and not shed:",
        "may_select:",
    ),
    Mutant(
        "R21",
        "an open slot selects nobody else",
        ROLLOUT,
        "if plan.slot is None and slot is None and may_select",
        "if may_select",
    ),
    Mutant(
        "R22",
        "broken replicas go first",
        ROLLOUT,
        "    BROKEN = 3\n",
        "    BROKEN = 0\n",
    ),
    Mutant(
        "R23",
        "healthy replicas go only while all are admitted",
        ROLLOUT,
        "elif each.is_outdated and may_trade:",
        "elif each.is_outdated:",
    ),
    Mutant(
        "R24",
        "the highest ordinal goes first",
        ROLLOUT,
        "ranked.append((rank, each.ordinal, each))",
        "ranked.append((rank, -each.ordinal, each))",
    ),
    Mutant(
        "V13",
        "another size is judged against the type anew",
        f"{PLAN}/checks.py",
        "str(role.size), ",
        "",
    ),
    Mutant(
        "V17",
        "other arguments are judged against the type anew",
        f"{PLAN}/checks.py",
        '"-" if asked is None else str(asked)',
        '""',
    ),
    Mutant(
        "R54",
        "an admitted group is no queue",
        f"{PLAN}/queueing.py",
        "        and condition_status(status, kueue.ADMITTED) in (None, \"False\")\n",
        "",
    ),
    Mutant(
        "S6",
        "peers of members that are going stay",
        f"{PLAN}/services.py",
        "            for member in members\n            if member.role",
        "            for member in members\n            if member.stands and member.role",
    ),
)  # fmt: skip


def missed_by(mutant: Mutant) -> str | None:
    """Return the scenario that fails without the guard; None when all pass."""
    source = ROOT / "operator" / mutant.path
    text = source.read_text("utf-8")
    if text.count(mutant.old) != 1:
        raise LookupError(f"{mutant.guard}: its line is there {text.count(mutant.old)} times")
    with tempfile.TemporaryDirectory() as folder:
        operator = pathlib.Path(folder) / "operator"
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "operator", operator, ignore=skipped)
        (operator / mutant.path).write_text(text.replace(mutant.old, mutant.new), "utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no"]
        command += ["-p", "no:cacheprovider", "-o", f"pythonpath={operator} router tests/support"]
        command += [f"--ignore={SCENARIOS}/{name}" for name in SLOW]
        try:
            ran = subprocess.run(
                [*command, SCENARIOS],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            )
        except subprocess.TimeoutExpired:
            return "it never comes to rest"
    failed = re.search(r"^(?:FAILED|ERROR) \S+::(\S+)", ran.stdout, re.MULTILINE)
    if ran.returncode == 0:
        return None
    if failed is None:
        raise RuntimeError(f"{mutant.guard}: {ran.stdout[-500:]} {ran.stderr[-500:]}")
    return failed[1]


def main(words: list[str]) -> int:
    """Take away the guards named, or all; print which scenario missed each."""
    kept = 0
    for mutant in MUTANTS:
        if words and not any(word in f"{mutant.rule} {mutant.guard}" for word in words):
            continue
        by = missed_by(mutant)
        kept += by is None
        print(f"{mutant.rule:6} {mutant.guard:52} {by or 'NOT MISSED'}", flush=True)
    return 1 if kept else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
