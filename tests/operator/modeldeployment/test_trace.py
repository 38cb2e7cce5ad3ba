"""`modelpool trace`: one replacement from its start to its end, told to a person."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from mdep_lab import NAMESPACE, Lab, role
from modelpool_kube import client, errors
from modelpool_kube.kinds import EVENTS, MODEL_DEPLOYMENTS, Json
from modelpool_operator.plan.modeldeployment.actions import Note
from modelpool_router.cli import trace
from modelpool_router.cli.main import app


class Told(Lab):
    """A lab whose operator's Events are in the cluster, as the API server keeps them."""

    async def _tell(self, obj: Json, note: Note) -> None:
        at = self.cluster.wall().strftime("%Y-%m-%dT%H:%M:%S.000000Z")
        body = {
            "metadata": {"generateName": "chat."},
            "eventTime": at,
            "reason": note.reason.value,
            "note": note.message,
            "type": "Warning" if note.is_warning else "Normal",
            "regarding": {"kind": "ModelDeployment", "uid": obj["metadata"]["uid"]},
        }
        self.cluster.put(EVENTS, NAMESPACE, body)


async def waiting() -> Told:
    """Return a lab with a replacement that waits for its admission."""
    lab = Told(role(replicas=2, size=2), cards=4)
    await lab.settle()
    lab.set_quota("a", 2)
    lab.edit(image="engine:2")
    await lab.until("WaitingForAdmission")
    for _ in range(2):
        await lab.look()
        lab.move()
    lab.cluster.advance(90)
    return lab


async def test_a_replacement_that_waits_is_told_with_what_it_waits_for() -> None:
    lab = await waiting()

    text = trace.told(await trace.gather(lab.cluster.port("me"), NAMESPACE, "chat"))

    assert "ModelDeployment team-a/chat: Degraded; server 1/2" in text
    assert "server/1: WaitingForAdmission for" in text and "because it is outdated" in text
    assert "2 of 2 new members, a Workload" in text
    why = "couldn't assign flavors: insufficient unused quota in queue-a"
    assert f"waits: Workload {lab.group(1)} is not admitted yet: {why}" in text
    assert "QuotaReserved: Pending" in text
    assert "no other replica of role server is replaced" in text


async def test_a_rollout_that_waits_for_a_sibling_is_told_with_the_sibling() -> None:
    lab = Told(role(replicas=2))
    await lab.settle()
    lab.set_quota("a", 1)
    lab.kueue.evict(NAMESPACE, lab.group(0))
    lab.move()
    lab.edit(image="engine:2")
    for _ in range(3):
        await lab.look()
        lab.move()

    text = trace.told(await trace.gather(lab.cluster.port("me"), NAMESPACE, "chat"))

    assert "nothing is being replaced" in text
    assert "waiting for quota: replica 0 of role server" in text
    assert "the next one of server is given up when every replica of the role is admitted" in text


async def test_the_history_of_one_replacement_is_in_the_order_of_its_steps() -> None:
    lab = await waiting()
    lab.set_quota("a", 100)
    await lab.until("")

    found = await trace.gather(lab.cluster.port("me"), NAMESPACE, "chat")

    assert [each["reason"] for each in found["history"]][:4] == [
        "ReplacementStarted",
        "ReplacementVacant",
        "ReplacementCreated",
        "ReplacementAdmitted",
    ]
    assert "replica 1 of role server is replaced" in trace.told(found)


async def test_a_record_that_cannot_be_read_and_an_operator_that_is_away_are_told() -> None:
    lab = await waiting()
    bad: Json = {"metadata": {"annotations": {trace.RECORD: "[1]"}}}
    lab.cluster.edit(MODEL_DEPLOYMENTS, NAMESPACE, "chat", bad)
    lab.edit(image="engine:3")

    text = trace.told(await trace.gather(lab.cluster.port("me"), NAMESPACE, "chat"))

    assert "the record cannot be read" in text and "does it run?" in text


async def test_nothing_under_way_and_no_events_are_told_as_such() -> None:
    lab = Lab()
    await lab.settle()

    text = trace.told(await trace.gather(lab.cluster.port("me"), NAMESPACE, "chat"))

    assert "nothing is being replaced" in text and "no events" in text


def test_the_command_prints_json_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Door:
        async def __aenter__(self) -> Door:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

    async def connect(**_: object) -> Door:
        return Door()

    async def gather(port: object, namespace: str, name: str) -> Json:
        if name == "nobody":
            raise errors.NotFound("no such object", code=404)
        return {"namespace": namespace, "name": name}

    monkeypatch.setattr(client, "connect", connect)
    monkeypatch.setattr(trace, "gather", gather)
    run = CliRunner()

    good = run.invoke(app, ["trace", "md/chat", "-n", "team-a", "--json"])
    missing = run.invoke(app, ["trace", "nobody"])
    wrong = run.invoke(app, ["trace", "pod/chat"])

    assert json.loads(good.stdout) == {"namespace": "team-a", "name": "chat"}
    assert missing.exit_code == 1 and "kubectl get modeldeployments" in missing.stderr
    assert wrong.exit_code == 2 and "md/NAME" in wrong.stderr
